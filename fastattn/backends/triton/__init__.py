"""The backend of Triton's kernels. `backend` has the passes, `job` a launch, and `tangents`
registers the backend."""
