"""What a layer computes where a few tokens are decoded: several products in one call."""
