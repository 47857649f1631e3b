"""``python -m trt_warmcache``."""

from trt_warmcache.cli import main

if __name__ == "__main__":
    main()
