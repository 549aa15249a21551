"""HTTP: server, connections and their limits, disconnects, server-sent events, errors, keys."""
