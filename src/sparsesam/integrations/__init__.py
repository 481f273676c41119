"""Support for third-party trainers. Each module needs the package it is named after."""
