"""The members of the cluster: who they are, how they connect, join and leave."""
