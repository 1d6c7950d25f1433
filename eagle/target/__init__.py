"""The frozen target model: forwards over trees, tapped features, its embedding and LM head."""
