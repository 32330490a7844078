"""`specserve local`: the regulate loop of the operator on a box without a cluster.

The policy, the loop, its leases and epochs and its decision log are the operator's own modules.
What a cluster does beside them is done here: `places` says where engines are, `state` keeps what
a status keeps, `news` tells what events tell, `session` puts it together.
"""
