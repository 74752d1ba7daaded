"""Members of the cluster: who they are, how they meet, join and leave."""
