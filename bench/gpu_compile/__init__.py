"""`make gpu-compile`: compile every shipped kernel configuration without a device and judge what comes out."""
