"""`peerd top`: the swarm live on a whole terminal. Asks the daemon's control socket, decides nothing, changes nothing but by `leave`.

poll -> recall -> picture -> lines are functions of values; feed asks, and screen, swarm_list and dialogs show.
"""
