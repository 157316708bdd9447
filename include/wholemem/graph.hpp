// Graphs: work that is captured from a stream and launched many times.

#pragma once

#include <cstdint>
#include <exception>
#include <type_traits>

#include <wholemem.h>
#include <wholemem/symmetric.hpp>

namespace wholemem {

/// Work that was captured from a stream.
class Graph : public detail::Handle<wm_graph_t, wm_graph_destroy> {
public:
    using Handle::Handle;

    /// Captures the work that `work(stream)` enqueues, instead of running it. An exception of `work` is thrown again.
    template <class Work> static Graph capture(const Communicator &communicator, Stream stream, Work &&work)
    {
        Capture<std::remove_reference_t<Work>> capture{&work, nullptr};
        wm_graph_t graph = {};
        const wm_status_t status = wm_graph_capture(communicator.get(), stream, &capture.run, &capture, &graph);
        if (capture.thrown)
            std::rethrow_exception(capture.thrown);
        check(status);
        return Graph(graph);
    }

    /// Enqueues the work on a stream.
    void launch(Stream stream) const { check(wm_graph_launch(get(), stream)); }

private:
    template <class Work> struct Capture {
        Work *work;
        std::exception_ptr thrown;

        // No exception may pass through the C function that calls this one.
        static wm_status_t run(void *data, void *stream)
        {
            auto &capture = *static_cast<Capture *>(data);
#if defined(__cpp_exceptions)
            try {
                (*capture.work)(stream);
            } catch (...) {
                capture.thrown = std::current_exception();
                return WM_ERROR_INTERRUPTED;
            }
#else
            (*capture.work)(stream);
#endif
            return WM_OK;
        }
    };
};

/// A recording of the memory of captured collective calls, so that graphs are not staged.
class CaptureRecording : public detail::Handle<wm_capture_recording_t, wm_capture_recording_destroy> {
public:
    using Handle::Handle;

    /// Starts a recording. Until it is finished, captured calls use memory in place that is not registered.
    static CaptureRecording start(const SymmetricMemory &symmetric)
    {
        wm_capture_recording_t recording = {};
        check(wm_capture_recording_start(symmetric.get(), &recording));
        return CaptureRecording(recording);
    }

    /// Registers the memory of the captured calls on all ranks, and returns the number of buffers. Collective. The memory stays mapped
    /// while this object has its handle.
    std::uint64_t finish() const
    {
        std::uint64_t count = 0;
        check(wm_capture_recording_finish(get(), &count));
        return count;
    }
};

} // namespace wholemem
