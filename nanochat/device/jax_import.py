"""JAX, which here only translates kernels for torch_xla: the TPU belongs to torch_xla alone."""
import os


def import_jax():
    """Returns the module jax, on the CPU and without a look at this machine's TPU. Call it before any other import of
    jax.

    On a TPU VM the import of jax changes three things (jax/_src/cloud_tpu_init.py), which are taken back here:
    - JAX would start the TPU that torch_xla has.
    - Before it writes a Pallas kernel, it would ask its runtime for the date of libtpu, and take the CPU's, which has
      none, for one that is too old. The libtpu that is pinned reads what the pinned JAX writes.
    - It adds an option for libtpu to the environment, so also to that of the ranks: chips that run different programs,
      as ranks may, would then wait for each other for ever (pytorch/xla issue 9084).
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    libtpu_options = os.environ.get("LIBTPU_INIT_ARGS", "")
    import jax
    from jax._src import cloud_tpu_init, tpu_custom_call
    os.environ["LIBTPU_INIT_ARGS"] = libtpu_options
    jax.config.update("jax_platforms", "cpu")  # if it was imported before
    cloud_tpu_init.running_in_cloud_tpu_vm = False
    # jaxlib 0.7.1 writes Pallas kernels in Mosaic version 8, libtpu 0.0.21 reads 7 (pytorch/xla issue 9614).
    tpu_custom_call.get_ir_version = lambda *args, **kwargs: 7
    return jax
