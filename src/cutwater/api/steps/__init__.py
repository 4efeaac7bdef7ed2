"""Making steps: their ids, inputs and types, and every check that can be made before rows flow."""
