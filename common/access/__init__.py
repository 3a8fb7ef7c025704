"""Where shards lie and how their bytes come here: paths and URLs, the network, the cache."""
