"""`embedctl up`: plans the workers of a machine and keeps them alive."""
