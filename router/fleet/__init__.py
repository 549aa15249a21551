"""The workers that the router uses: their links, load, cached blocks and metrics."""
