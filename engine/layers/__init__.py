"""Parts of a layer that every model shares: linear layers, rotary embedding, norms and gates."""
