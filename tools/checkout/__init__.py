"""Scripts for a checkout: its imports, its prose, its installed form. A wheel does not contain them."""
