"""Discovery, checks and registration of plugins."""
