"""Accounts on the wire: they come as they were told, and what cannot be one is refused before anybody looks at a signature."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from peerd.errors import BadMessageError
from peerd.generated import swarm_pb2, swarm_pb2_grpc
from peerd.policy.step.accounts import EVERY, MOST_SIGNERS, MOST_TIME_S, WorkDone
from peerd.table.record import PeerId
from peerd.wire.accounts import AccountsTold, AccountsWanted, told_from, told_to, wanted_from, wanted_to
from peerd.wire.budgets import allowance_of
from peerd.wire.swarm_client import SwarmClient
from tests.policy.account_world import RUN, audit_word, names, signed_by, some_account
from tests.wire.callee import BAD, Callee, assert_refused
from tests.wire.callee import RUN as SERVED

ROWS = {peer: WorkDone(3, 40 + at, 99) for at, peer in enumerate(names(40))}
SIGNED = signed_by(some_account(EVERY * 9, ROWS), names(40)[-MOST_SIGNERS:])
WANTED = AccountsWanted(0, 3, audited=names(1)[0], told=SIGNED)
TOLD = AccountsTold((SIGNED,), ROWS, audit_word(names(3)[2], names(1)[0], 5))


def read(reply: swarm_pb2.AccountsReply, wanted: AccountsWanted = WANTED) -> AccountsTold:
    return told_from(swarm_pb2.AccountsReply.FromString(reply.SerializeToString()), RUN, wanted, names(3)[2])


def test_accounts_come_as_they_were_told() -> None:
    assert read(told_to(TOLD)) == TOLD
    assert read(told_to(AccountsTold())) == AccountsTold()
    assert wanted_from(wanted_to(RUN, WANTED)) == WANTED


def test_the_largest_account_takes_few_bytes() -> None:
    assert told_to(AccountsTold((SIGNED,))).ByteSize() < 4_000, "and daemons' ids are longer by 44 characters, 62 times"
    assert wanted_to(RUN, WANTED).ByteSize() < allowance_of("Accounts").num_bytes


def changed(change: Any) -> swarm_pb2.AccountsReply:
    reply = told_to(TOLD)
    change(reply)
    return reply


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply.accounts.extend([reply.accounts[0]] * 4),
        lambda reply: reply.accounts.append(reply.accounts[0]),
        lambda reply: reply.rows.append(reply.rows[0]),
        lambda reply: setattr(reply.rows[0], "steps", 1 << 63),
        lambda reply: setattr(reply.rows[0], "tokens", 1 << 62),
        lambda reply: setattr(reply.rows[0], "peer", "x" * 100),
        lambda reply: setattr(reply.rows[0], "steps", 99),
        lambda reply: setattr(reply.accounts[0], "root", b"short"),
        lambda reply: setattr(reply.accounts[0], "step", EVERY + 1),
        lambda reply: setattr(reply.accounts[0], "first_step", EVERY * 9),
        lambda reply: setattr(reply.accounts[0], "averages", EVERY * 9 + 1),
        lambda reply: reply.accounts[0].signers.append("zzz"),
        lambda reply: reply.accounts[0].signers.reverse(),
        lambda reply: setattr(reply.accounts[0].vouches[0], "signature", b"short"),
        lambda reply: setattr(reply.accounts[0].vouches[0], "time_s", MOST_TIME_S),
        lambda reply: setattr(reply.accounts[0].vouches[0], "signer", "\x1b[2J"),
        lambda reply: setattr(reply.audits, "right", 1 << 62),
        lambda reply: setattr(reply.audits, "signature", b""),
    ],
)
def test_what_can_be_no_account_is_refused(change: Any) -> None:
    with pytest.raises(BadMessageError):
        read(changed(change))


def test_nothing_that_a_peer_answers_raises_another_error() -> None:
    chance = random.Random(3)
    raw = bytearray(told_to(TOLD).SerializeToString())
    for _ in range(2_000):
        broken = bytearray(raw)
        for _ in range(chance.randrange(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            reply = swarm_pb2.AccountsReply.FromString(bytes(broken[: chance.randrange(len(broken) + 1)]))
        except DecodeError:
            continue
        try:
            told_from(reply, RUN, WANTED, PeerId("teller"))
        except BadMessageError:
            continue


async def test_a_question_is_answered_and_one_out_of_range_is_refused(callee: Callee) -> None:
    client = SwarmClient(callee.links(), SERVED)
    assert await client.accounts(callee.caller.peer, AccountsWanted(1), 5.0) == AccountsTold()
    request = swarm_pb2.AccountsRequest(run=SERVED, since=1 << 63)
    stub = await callee.served.stub(swarm_pb2_grpc.SwarmStub, callee.caller.peer)
    await assert_refused(callee, stub.Accounts(request), BAD, "accounts that are none")


async def test_an_account_that_is_none_is_not_taken(callee: Callee) -> None:
    broken = swarm_pb2.AccountsRequest(run=SERVED, told=swarm_pb2.Account(step=EVERY))
    stub = await callee.served.stub(swarm_pb2_grpc.SwarmStub, callee.caller.peer)
    await assert_refused(callee, stub.Accounts(broken), BAD, "an account without rows")
