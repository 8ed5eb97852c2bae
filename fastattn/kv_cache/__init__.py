"""Keys and values that are kept between calls: the cache, and the pages that it stores them in."""
