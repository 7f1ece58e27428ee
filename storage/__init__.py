"""The ground floor: records, files and configuration. Imports numpy, h5py and pydantic; never torch."""
