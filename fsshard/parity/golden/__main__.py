"""``python -m fsshard.parity.golden``: write the library's golden runs again, on purpose."""

from fsshard.parity.golden import write_all

if __name__ == "__main__":
    write_all()
