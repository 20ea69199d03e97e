"""Ways to switch a model that exists to MX: any JAX function, flax models by way of qwix."""
