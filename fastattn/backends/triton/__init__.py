"""The backend of Triton's kernels: `backend` registers it, `job` and `tangents` have its passes."""
