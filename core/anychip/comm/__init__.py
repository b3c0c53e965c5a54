"""How ranks find each other and know who is still there; the registry puts it into backends."""
