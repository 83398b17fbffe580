"""Which expert a token goes to: routers, replicas and their loads."""
