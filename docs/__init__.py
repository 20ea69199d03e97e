"""The site: `conf` is Sphinx's configuration, `tables` and `pictures` draw from code."""
