"""Workers of several processes: ranks that share the heads of a model's layers (TP), or divide the layers (PP)."""
