"""What runs inside an allocation: the experiment, the supervisor and the roles that it starts."""
