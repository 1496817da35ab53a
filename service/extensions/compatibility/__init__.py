"""The routes of other servers, so that their clients need only another address."""
