"""The version of the library, which its reports and `mupscale --version` show."""

VERSION = "0.1.0"
