"""What operators can see: records of what texts were given and took, and what is made of them."""
