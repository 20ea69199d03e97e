"""What makes the site: `conf` is Sphinx's configuration, `tables` and `pictures` draw from code."""
