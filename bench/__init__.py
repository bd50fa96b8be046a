"""What Pagekeeper claims, measured on this machine."""
