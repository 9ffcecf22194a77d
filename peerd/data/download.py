"""Downloads text and tokenizers: from http(s) URLs, and from a model hub by name.

A download has a size limit, continues after an interruption, and is kept in the cache. Only the organiser's machine, or that of a
volunteer who names a source, downloads anything: a manifest from the network never makes a machine open a URL.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from peerd.config.atomic import commit, replace_file
from peerd.data.progress import ByteProgress, Report
from peerd.errors import DiskError, ManifestError, UnreachableError, disk_error

HUB_PREFIX = "hub:"
HUB = "https://huggingface.co"
MOST_BYTES = 1 << 40
MOST_ANSWER_BYTES = 16 << 20
"""Largest reply of the hub about a data set."""
SILENCE_S = 30.0
TRIES = 5
READ_BYTES = 1 << 20
MOST_HUB_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){0,3}")


def obtain(source: str, cache: Path, digest: str, report: Report) -> str:
    """The path in the cache of a URL's file or of the folder of a hub's data set; downloads it if it is not there.

    `digest` is the BLAKE3 hash that a URL's file must have, or empty. Raises UnreachableError, ManifestError, DiskError.
    """
    folder = cache / "downloads" / blake3(source.encode()).hexdigest(length=16)
    if source.startswith(HUB_PREFIX):
        return _obtain_data_set(source, folder, report)
    path = download(source, folder, report)
    if digest and (found := file_hash(path)) != digest:
        path.unlink()
        raise ManifestError(f"{source} gives a file with blake3 {found[:12]}..., the run's has {digest[:12]}...", "ask for the right one")
    return str(path)


def obtain_tokenizer(named: str, cache: Path, report: Report) -> Path:
    """The path of a tokenizer that is named by path or as `hub:NAME`; downloads the latter."""
    if not named.startswith(HUB_PREFIX):
        return Path(named).expanduser()
    name = _hub_name(named, "data.tokenizer")
    folder = cache / "downloads" / blake3(named.encode()).hexdigest(length=16)
    try:
        download(f"{_hub()}/{name}/resolve/main/tokenizer.json", folder, report)
    except UnreachableError as error:
        raise UnreachableError(error.message, f"download {name}'s tokenizer.json elsewhere and name its path") from None
    with contextlib.suppress(UnreachableError):  # it names the token that ends a document; not every tokenizer has the file
        download(f"{_hub()}/{name}/resolve/main/tokenizer_config.json", folder, report)
    return folder


def file_hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def download(url: str, folder: Path, report: Report, most_bytes: int = MOST_BYTES) -> Path:
    """Download a URL's file into `folder`, under its own name. Continues an earlier attempt if the server supports it."""
    name = _checked_name(url)
    target, part = folder / name, folder / f".{name}.part"
    if target.exists():
        return target
    tries, before = 0, -1
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _fetch(url, part, report, most_bytes)
            commit(part, target)
            return target
        except urllib.error.HTTPError as error:
            raise UnreachableError(f"{url}: the server says {error.code} {error.reason}", "check the address") from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reached = part.stat().st_size if part.exists() else 0
            tries, before = (0 if reached > before >= 0 else tries + 1), reached
            if tries >= TRIES or _is_hopeless(error):
                why = getattr(error, "reason", None) or error
                raise UnreachableError(
                    f"{url} cannot be downloaded: {why}", "try again to continue, or download it elsewhere and name the file"
                ) from None
            time.sleep(0.1 * 2**tries)
        except OSError as error:
            raise disk_error(folder, error) from error


def _fetch(url: str, part: Path, report: Report, most_bytes: int) -> None:
    """Append the missing part of the file. The server's version mark shows if it is still the same file."""
    mark_file = part.with_suffix(".mark")
    reached, mark = (part.stat().st_size, mark_file.read_text()) if part.exists() and mark_file.exists() else (0, "")
    headers = {"User-Agent": "peerd"} | ({"Range": f"bytes={reached}-", "If-Range": mark} if reached and mark else {})
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme is checked by _checked_name
    with urllib.request.urlopen(request, timeout=SILENCE_S) as answer:  # noqa: S310 - the scheme is checked by _checked_name
        goes_on = answer.status == http.client.PARTIAL_CONTENT and str(answer.headers.get("Content-Range", "")).startswith(
            f"bytes {reached}-"
        )
        reached = reached if goes_on else 0
        total = reached + int(answer.headers.get("Content-Length") or 0)
        _check_room(url, part.parent, total, reached, most_bytes)
        mark_file.write_text(_mark_of(answer.headers))
        with part.open("ab") as stream:
            stream.truncate(reached)
            _copy(answer, stream, ByteProgress(f"downloading {part.name[1:-5]}", reached, total), report, most_bytes)
    mark_file.unlink(missing_ok=True)


def _copy(answer: IO[bytes], stream: IO[bytes], progress: ByteProgress, report: Report, most_bytes: int) -> None:
    done, total = progress.done_bytes, progress.total_bytes
    while chunk := answer.read(READ_BYTES):
        stream.write(chunk)
        done += len(chunk)
        if done > most_bytes:
            raise ManifestError(f"the download grew past {most_bytes} bytes", "is it the right address?")
        report(ByteProgress(progress.what, done, total))
    if total and done < total:
        raise http.client.IncompleteRead(b"", total - done)


def _check_room(url: str, folder: Path, total: int, reached: int, most_bytes: int) -> None:
    if total > most_bytes:
        raise ManifestError(f"{url} is {total} bytes; the limit is {most_bytes}", "is it the right address?")
    free = shutil.disk_usage(folder).free
    if total - reached > free:
        raise DiskError(f"{url} needs {(total - reached) / 1e9:.1f} GB in {folder} and {free / 1e9:.1f} GB is free", "free some space")


def _mark_of(headers: Any) -> str:
    """A strong ETag, else the modification time; empty if a download cannot be continued safely."""
    tag = str(headers.get("ETag") or "")
    return tag if tag and not tag.startswith("W/") else str(headers.get("Last-Modified") or "")


def _is_hopeless(error: Exception) -> bool:
    """True for a refused connection or an unknown host: trying again at once changes nothing."""
    reason = getattr(error, "reason", error)
    return isinstance(error, urllib.error.URLError) and not isinstance(reason, TimeoutError)


def _checked_name(url: str) -> str:
    """The last part of a URL's path, as a file name. ManifestError if the URL is not valid."""
    try:
        parts = urllib.parse.urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        sound = False
    if not sound:
        raise ManifestError(f"data source {url}: not an http(s) address", "correct data.source")
    if parts.username or parts.password:
        raise ManifestError(f"data source {parts.hostname}: an address with a password in it", "leave the password out of data.source")
    name = urllib.parse.unquote(parts.path).rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:100] or "download"


# The hub


def _obtain_data_set(source: str, folder: Path, report: Report) -> str:
    """Download the hub's parquet files of `hub:OWNER/NAME[/CONFIGURATION[/SPLIT]]`. The default split is `train`."""
    whole = folder / "whole"
    if whole.exists():
        return str(folder)
    owner_and_name, configuration, split = _parts_of(source)
    listing = _ask_hub(f"{_hub()}/api/datasets/{owner_and_name}/parquet", owner_and_name)
    if not isinstance(listing, dict) or not listing:
        raise ManifestError(f"data source {source}: the hub has no parquet files of it", "download it elsewhere and name its folder")
    configuration = configuration or ("default" if "default" in listing else next(iter(listing)))
    splits = listing.get(configuration)
    urls = splits.get(split) if isinstance(splits, dict) else None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls) or not 0 < len(urls) <= MOST_HUB_FILES:
        known = ", ".join(f"{name}/{part}" for name, parts in listing.items() for part in parts)
        raise ManifestError(f"data source {source}: no {configuration}/{split}", f"the hub has: {known[:400]}")
    for number, url in enumerate(urls):
        piece = folder / f"{number:05}.parquet"
        if not piece.exists():
            download(url, folder / f".{number:05}", report).replace(piece)
    replace_file(whole, source)
    return str(folder)


def _parts_of(source: str) -> tuple[str, str, str]:
    owner, _, rest = _hub_name(source, "data.source").partition("/")
    name, *more = rest.split("/") if rest else [""]
    if not name:
        raise ManifestError(f"data source {source}: not a data set's name", "for example hub:OWNER/NAME[/CONFIGURATION[/SPLIT]]")
    return f"{owner}/{name}", more[0] if more else "", more[1] if len(more) > 1 else "train"


def _hub_name(named: str, field: str) -> str:
    name = named.removeprefix(HUB_PREFIX)
    if not _NAME.fullmatch(name):
        raise ManifestError(f"{field} {named[:200]}: not a name on the hub", "for example hub:OWNER/NAME")
    return name


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", HUB).rstrip("/")


def _ask_hub(url: str, name: str) -> Any:
    _checked_name(url)
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_S) as answer:  # noqa: S310 - the scheme is checked by _checked_name
            return json.loads(answer.read(MOST_ANSWER_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise UnreachableError(f"the hub cannot be asked for {name}: {why}", "download it elsewhere and name its folder") from None
