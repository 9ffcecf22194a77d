"""`peerd top`: the swarm live on a whole terminal. It reads the daemon's control socket, and sends only `pause`, `resume` and `leave`.

poll -> recall -> picture -> lines are functions of values; feed.py asks the daemon, and app.py, swarm_list.py and dialogs.py draw.
"""
