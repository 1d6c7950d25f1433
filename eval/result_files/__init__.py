"""Result files, and the statistics that are drawn from them."""
