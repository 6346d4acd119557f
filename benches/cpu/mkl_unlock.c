/* Preloaded, lets MKL take its fast path on processors of other makers too: PyTorch at its best, not as installed. */
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
