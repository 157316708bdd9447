// Tensors whose rows are divided among ranks (tables): gather, scatter and scatter-add by row.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <wholemem.h>
#include <wholemem/dtype.hpp>
#include <wholemem/memory.hpp>

namespace wholemem {

/// The specification of a tensor, equal on all ranks.
struct TensorSpec {
    /// The shape, rows first.
    std::vector<std::uint64_t> shape = {};
    /// The element type.
    Dtype dtype = Dtype::F32;
    Kind kind = Kind::Continuous;
    Location location = Location::Device;
    /// The number of rows of each rank; empty to divide the rows evenly.
    std::vector<std::uint64_t> rows_of_each = {};
    /// Whether the tensor must have the same addresses on all ranks, so that ranks can exchange pointers.
    bool equal_addresses = false;

    /// The specification of a tensor with elements of a C++ type.
    template <class T> static TensorSpec of(std::vector<std::uint64_t> shape)
    {
        TensorSpec spec;
        spec.shape = std::move(shape);
        spec.dtype = dtype_of<T>;
        return spec;
    }
};

/// Rows at one range of addresses.
template <class T> struct Rows {
    /// The number of the first row.
    std::uint64_t first_row = 0;
    /// The number of rows, which may be 0.
    std::uint64_t row_count = 0;
    /// The address of the first row.
    T *data = nullptr;
    /// The number of elements from one row to the next.
    std::uint64_t stride = 0;
    /// The number of elements of a row.
    std::uint64_t width = 0;

    /// The elements of row `first_row + position`.
    span<T> operator[](std::uint64_t position) const
    {
        return {data + position * stride, static_cast<std::size_t>(width)};
    }
};

/// Row indices in memory that the device can access. An index that names no row is reported by `WholeTensor::check_indices`.
struct Indices {
    /// Indices of 64 bits.
    Indices(const std::int64_t *first, std::uint64_t number) noexcept : address(first), count(number), type(WM_INDEX_I64) {}
    /// Indices of 32 bits.
    Indices(const std::int32_t *first, std::uint64_t number) noexcept : address(first), count(number), type(WM_INDEX_I32) {}

    const void *address;
    std::uint64_t count;
    wm_index_type_t type;
    /// Whether indices that name no row are not reported.
    bool skip_bad = false;
};

/// The order in which a scatter writes rows with equal indices.
enum class Order : wm_order_t {
    /// Any order, which may differ between runs.
    Any = WM_ORDER_ANY,
    /// A fixed order, so that results are bitwise the same in every run. The call is then collective.
    Fixed = WM_ORDER_FIXED,
};

/// A tensor whose rows are divided among the ranks of a communicator, or a view of some of its rows and columns.
class WholeTensor : public detail::Handle<wm_tensor_t, wm_tensor_destroy> {
public:
    using Handle::Handle;

    /// Creates a tensor of zeros. Collective.
    static WholeTensor create(const Communicator &communicator, const TensorSpec &spec)
    {
        wm_tensor_spec_t c_spec = {};
        c_spec.struct_size = sizeof c_spec;
        c_spec.shape = spec.shape.data();
        c_spec.dimensions = static_cast<std::uint32_t>(spec.shape.size());
        c_spec.dtype = static_cast<wm_dtype_t>(spec.dtype);
        c_spec.kind = static_cast<wm_kind_t>(spec.kind);
        c_spec.location = static_cast<wm_location_t>(spec.location);
        c_spec.equal_addresses = spec.equal_addresses;
        c_spec.rows_of_each = spec.rows_of_each.data();
        c_spec.rows_of_each_count = static_cast<std::uint32_t>(spec.rows_of_each.size());
        wm_tensor_t tensor = {};
        check(wm_tensor_create(communicator.get(), &c_spec, &tensor));
        return WholeTensor(tensor);
    }

    /// Creates a tensor over the rows of a memory, without a copy.
    template <class T> static WholeTensor of_memory(const WholeMemory &memory, span<const std::uint64_t> row_shape)
    {
        wm_tensor_t tensor = {};
        check(wm_tensor_of_memory(memory.get(), static_cast<wm_dtype_t>(dtype_of<T>), row_shape.data(),
                                  static_cast<std::uint32_t>(row_shape.size()), &tensor));
        return WholeTensor(tensor);
    }

    /// Loads a tensor from the folder of a saved tensor, a `.npy` file or a `.safetensors` file. Collective.
    static WholeTensor load(const Communicator &communicator, const std::string &path, const wm_load_options_t *options = nullptr)
    {
        wm_tensor_t tensor = {};
        check(wm_tensor_load(communicator.get(), path.c_str(), options, &tensor));
        return WholeTensor(tensor);
    }

    /// Saves the tensor as a folder, which appears only when it is completely written. Collective.
    void save(const std::string &path, bool overwrite = false) const { check(wm_tensor_save(get(), path.c_str(), overwrite)); }

    /// Creates a tensor of zeros with the type and shape of this one, and as many rows on each rank. Collective.
    WholeTensor like() const
    {
        wm_tensor_t tensor = {};
        check(wm_tensor_create_like(get(), &tensor));
        return WholeTensor(tensor);
    }

    /// The properties of the tensor.
    wm_tensor_info_t info() const
    {
        wm_tensor_info_t info = {};
        info.struct_size = sizeof info;
        check(wm_tensor_info(get(), &info));
        return info;
    }

    /// The lengths of the dimensions, rows first.
    std::vector<std::uint64_t> shape() const
    {
        std::vector<std::uint64_t> shape(info().dimensions);
        check(wm_tensor_shape(get(), shape.data(), static_cast<std::uint32_t>(shape.size())));
        return shape;
    }

    /// The element type.
    Dtype dtype() const { return static_cast<Dtype>(info().dtype); }

    /// The number of rows.
    std::uint64_t row_count() const { return info().row_count; }

    /// A view of the rows from `first` to before `end`. It shares the memory.
    WholeTensor rows(std::uint64_t first, std::uint64_t end) const
    {
        wm_tensor_t part = {};
        check(wm_tensor_rows(get(), first, end, &part));
        return WholeTensor(part);
    }

    /// A view of the columns (the second dimension) from `first` to before `end`. It shares the memory.
    WholeTensor columns(std::uint64_t first, std::uint64_t end) const
    {
        wm_tensor_t part = {};
        check(wm_tensor_columns(get(), first, end, &part));
        return WholeTensor(part);
    }

    /// The rows that this rank stores. The address is valid until the tensor and its views are released.
    template <class T> Rows<T> local() const
    {
        wm_rows_t rows = empty_rows();
        check(wm_tensor_local(get(), &rows));
        return rows_as<T>(rows);
    }

    /// The rows that a rank stores, at the addresses where this rank has mapped them.
    template <class T> Rows<T> rows_of(std::uint32_t rank) const
    {
        wm_rows_t rows = empty_rows();
        check(wm_tensor_rows_of(get(), rank, &rows));
        return rows_as<T>(rows);
    }

    /// All rows of a continuous tensor.
    template <class T> Rows<T> all_rows() const
    {
        wm_rows_t rows = empty_rows();
        check(wm_tensor_all_rows(get(), &rows));
        return rows_as<T>(rows);
    }

    /// Gathers rows to the host, and waits: row `indices[n]` is copied to row `n` of the result. Not collective.
    template <class T> std::vector<T> gather(span<const std::int64_t> indices) const
    {
        const wm_tensor_info_t found = info();
        detail::require_dtype<T>(static_cast<Dtype>(found.dtype));
        std::vector<T> rows(indices.size() * static_cast<std::size_t>(found.row_len / sizeof(T)));
        check(wm_tensor_gather(get(), indices.data(), indices.size(), rows.data(), rows.size() * sizeof(T)));
        return rows;
    }

    /// Gathers rows to memory of the host, and waits. `rows` has the elements of as many rows as there are indices.
    template <class T> void gather_into(span<const std::int64_t> indices, span<T> rows) const
    {
        detail::require_dtype<T>(dtype());
        check(wm_tensor_gather(get(), indices.data(), indices.size(), rows.data(), rows.size_bytes()));
    }

    /// Scatters rows from the host, and waits: row `n` of `rows` replaces row `indices[n]`. Not collective. Other ranks see the rows
    /// after the next barrier.
    template <class T> void scatter(span<const std::int64_t> indices, span<const T> rows) const
    {
        detail::require_dtype<T>(dtype());
        check(wm_tensor_scatter(get(), indices.data(), indices.size(), rows.data(), rows.size_bytes()));
    }

    /// Adds rows from the host to rows of the tensor, and waits. Not collective, except for tensors in host memory, where all ranks
    /// make the call, also with no rows.
    template <class T> void scatter_add(span<const std::int64_t> indices, span<const T> rows) const
    {
        detail::require_dtype<T>(dtype());
        check(wm_tensor_scatter_add(get(), indices.data(), indices.size(), rows.data(), rows.size_bytes()));
    }

    /// Copies contiguous rows of any rank, from `first_row` on, to the host, and waits.
    template <class T> void read_rows(std::uint64_t first_row, span<T> rows) const
    {
        detail::require_dtype<T>(dtype());
        check(wm_tensor_read_rows(get(), first_row, rows.data(), rows.size_bytes()));
    }

    /// Copies contiguous rows from the host to the tensor, from `first_row` on, and waits. Other ranks see the rows after the next
    /// barrier.
    template <class T> void write_rows(std::uint64_t first_row, span<const T> rows) const
    {
        detail::require_dtype<T>(dtype());
        check(wm_tensor_write_rows(get(), first_row, rows.data(), rows.size_bytes()));
    }

    /// Enqueues a gather on a stream: `output` is memory that the device can access, with contiguous rows. If `T` is not the element
    /// type of the tensor, elements are converted. The operands must stay valid until the work has run. Not collective.
    template <class T> void gather_on(Stream stream, const Indices &indices, T *output) const
    {
        const wm_indices_t c_indices = c_indices_of(indices);
        const wm_row_buffer_t buffer = buffer_of<T>(output);
        check(wm_tensor_gather_on(get(), stream, &c_indices, &buffer));
    }

    /// Enqueues a scatter on a stream. Not collective, except with `Order::Fixed`. Other ranks see the rows after the next barrier.
    template <class T>
    void scatter_on(Stream stream, const Indices &indices, const T *input, Order order = Order::Any) const
    {
        const wm_indices_t c_indices = c_indices_of(indices);
        const wm_row_buffer_t buffer = buffer_of<T>(const_cast<T *>(input));
        check(wm_tensor_scatter_on(get(), stream, &c_indices, &buffer, static_cast<wm_order_t>(order)));
    }

    /// Enqueues a scatter-add on a stream. Not collective, except with `Order::Fixed` and for tensors in host memory.
    template <class T>
    void scatter_add_on(Stream stream, const Indices &indices, const T *input, Order order = Order::Any) const
    {
        const wm_indices_t c_indices = c_indices_of(indices);
        const wm_row_buffer_t buffer = buffer_of<T>(const_cast<T *>(input));
        check(wm_tensor_scatter_add_on(get(), stream, &c_indices, &buffer, static_cast<wm_order_t>(order)));
    }

    /// Throws `WM_ERROR_BAD_INDEX` if enqueued work that has run had an index that names no row, once. Wait for the stream first.
    void check_indices() const { check(wm_tensor_check(get())); }

private:
    static wm_rows_t empty_rows()
    {
        wm_rows_t rows = {};
        rows.struct_size = sizeof rows;
        return rows;
    }

    template <class T> Rows<T> rows_as(const wm_rows_t &found) const
    {
        const wm_tensor_info_t of = info();
        detail::require_dtype<T>(static_cast<Dtype>(of.dtype));
        if (found.stride % sizeof(T) != 0)
            detail::raise(Error(WM_ERROR_MISALIGNED, "the number of bytes from one row to the next is not a multiple of an element"));
        return {found.first_row, found.row_count, static_cast<T *>(found.address), found.stride / sizeof(T), of.row_len / sizeof(T)};
    }

    static wm_indices_t c_indices_of(const Indices &indices)
    {
        wm_indices_t c_indices = {};
        c_indices.struct_size = sizeof c_indices;
        c_indices.address = indices.address;
        c_indices.count = indices.count;
        c_indices.index_type = indices.type;
        c_indices.skip_bad = indices.skip_bad;
        return c_indices;
    }

    template <class T> static wm_row_buffer_t buffer_of(T *address)
    {
        wm_row_buffer_t buffer = {};
        buffer.struct_size = sizeof buffer;
        buffer.address = address;
        buffer.dtype = static_cast<wm_dtype_t>(dtype_of<T>);
        buffer.convert = 1;
        return buffer;
    }
};

} // namespace wholemem
