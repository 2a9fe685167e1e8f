"""One module for each framework; importing one imports that framework and no other."""
