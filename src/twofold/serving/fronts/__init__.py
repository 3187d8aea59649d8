"""Gateway processes beside the process of a service: HTTP here, decisions and state there."""
