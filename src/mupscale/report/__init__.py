"""Pictures of what happened. Needs the `plots` extra."""
