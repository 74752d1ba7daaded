"""The members of the cluster: the table of members, and how they connect, join and leave."""
