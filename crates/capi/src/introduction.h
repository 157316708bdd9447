/*
 * The C interface of wholemem: one memory over many GPUs, processes and threads of one machine.
 *
 * What holds for all functions, unless their documentation states otherwise:
 *
 * Status: a function returns WM_OK or the number of an error. wm_last_error() returns the message of this thread's last call.
 * Outputs are written only by calls that return WM_OK. No call ends the process or throws.
 *
 * Handles: an object is referred to by a handle, a structure with one number; {0} is no handle. Handles are compared by their
 * numbers. A function that creates an object gives its handle to the caller, who frees it with the function `..._destroy` of its
 * type. Objects keep the objects alive that they need, so handles can be freed in any order. A handle that is zero, was freed, is
 * of another type or of another process is the error WM_ERROR_INVALID_HANDLE. If a handle is freed while other threads use it,
 * their calls complete first, and the last of them releases the object.
 *
 * Pointers: a null pointer is the error WM_ERROR_NULL_POINTER, unless the function accepts it. Memory, texts and structures that
 * the caller passes belong to the caller, and are used only during the call, except memory of work that is enqueued on a stream,
 * which must stay valid until the work has run. Texts are UTF-8 and end with a NUL. Lengths (`len`) are bytes.
 *
 * Structures: the first field of structures with options is `struct_size`. Zero the structure, and set the field to its `sizeof`.
 * Zero is the default of every field, and a null pointer to options means all defaults. Later versions append fields; a program
 * and a library of different versions work together.
 *
 * Streams: a stream is a cudaStream_t, passed as `void *`; null is the default stream of the device. It must be of the device of
 * the communicator. On the host backend streams are ignored: work has run when the call returns. Work on other devices may run
 * after the call.
 *
 * Threads: every function may be called from any thread. Functions of different objects run concurrently. "Collective" functions
 * must be called by all ranks of a communicator, in the same order and with arguments that agree; two threads that make
 * collective calls on one communicator at the same time get WM_ERROR_BUSY.
 *
 * Waits: every wait ends at a timeout: that of the communicator, or one that is passed in nanoseconds (WM_TIMEOUT_INFINITE for
 * none). If a rank dies, the calls that wait for it return WM_ERROR_PEER_LOST at once.
 *
 * Forks: a forked child that uses an object of its parent gets WM_ERROR_FORKED. It can create objects of its own.
 */
