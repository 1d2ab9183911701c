// pelton.hpp: pelton.h for C++17 and later, header-only. A member function is the C function of the same name, whose
// comment in pelton/*.h says what it does, whether it waits, and its errors.
//
//     auto sender = pelton::sender::open("events");                  auto listener = pelton::listener::open("events");
//     if (!sender) return report(sender.error());                    auto receiver = listener->accept_receiver();
//     auto sent = sender->send(pelton::as_bytes("hello"), 1s);       for (auto &message : receiver->messages())
//     if (!sent && sent.error() == PELTON_AGAIN) wait_for_space();       use(message.bytes());
//
// RESULTS are pelton::expected<T>: std::expected<T, std::error_code> where the standard library has it, else a class
// with the same members. An error compares equal to a code of pelton.h; PELTON_SYSTEM becomes errno in
// std::system_category(). Only value() throws, if it has none; the header works with -fno-exceptions and -fno-rtti.
//
// HANDLES (sender, receiver, client and so on) are unique: they move, and their destructor closes them. An empty one,
// after a move, returns PELTON_NULL. Message, request, completion and reservation belong to a handle for a while:
// their destructor releases or aborts. Destroy each before the handle, and before you receive or reserve the next one.
#ifndef PELTON_HPP
#define PELTON_HPP

#include <pelton.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#if __has_include(<version>)
#include <version>
#endif
#ifdef __cpp_lib_expected
#include <expected>
#endif
#ifdef __cpp_lib_span
#include <span>
#endif

// Part of every name, because the types below depend on the standard: objects of different standards can be linked.
#if defined(__cpp_lib_expected)
#define PELTON_CXX_ cxx23
#elif defined(__cpp_lib_span)
#define PELTON_CXX_ cxx20
#else
#define PELTON_CXX_ cxx17
#endif

// ---- Errors ---------------------------------------------------------------------------------------------------------

namespace pelton {
inline namespace PELTON_CXX_ {

inline const std::error_category &category() noexcept {
    static const struct : std::error_category {
        const char *name() const noexcept override { return "pelton"; }
        std::string message(int code) const override { return pelton_code_text(code); }
    } category;
    return category;
}

} // namespace PELTON_CXX_
} // namespace pelton

template <> struct std::is_error_code_enum<pelton_code> : std::true_type {};
inline std::error_code make_error_code(pelton_code code) noexcept { return {code, pelton::category()}; }

namespace pelton {
inline namespace PELTON_CXX_ {

// One line about the last failed call of this thread; valid until its next call.
inline const char *error_detail() noexcept { return pelton_error_detail(); }
inline std::uint32_t version() noexcept { return pelton_version(); }
// As pelton_set_log: any thread may call `log`, which must call no pelton function.
inline void set_log(pelton_log log, void *context = nullptr) noexcept { pelton_set_log(log, context); }

#ifdef __cpp_lib_expected
template <typename T> using expected = std::expected<T, std::error_code>;
using unexpected = std::unexpected<std::error_code>;
#else
struct unexpected {
    explicit unexpected(std::error_code error) noexcept : error_(error) {}
    const std::error_code &error() const noexcept { return error_; }

private:
    std::error_code error_;
};

struct bad_expected_access : std::exception {
    explicit bad_expected_access(std::error_code error) noexcept : error_(error) {}
    const char *what() const noexcept override { return "bad access to pelton::expected without a value"; }
    const std::error_code &error() const noexcept { return error_; }

private:
    std::error_code error_;
};

namespace detail {
[[noreturn]] inline void no_value(std::error_code error) {
#ifdef __cpp_exceptions
    throw bad_expected_access(error);
#else
    (void)error;
    std::abort();
#endif
}
} // namespace detail

// The members of std::expected that this header's users need.
template <typename T> class [[nodiscard]] expected {
public:
    expected(T value) noexcept : value_(std::move(value)) {}
    expected(unexpected error) noexcept : error_(error.error()) {}
    bool has_value() const noexcept { return value_.has_value(); }
    explicit operator bool() const noexcept { return has_value(); }
    const std::error_code &error() const noexcept { return error_; }
    T &value() & { return has_value() ? *value_ : (detail::no_value(error_), *value_); }
    T &&value() && { return std::move(value()); }
    T &operator*() & noexcept { return *value_; }
    T &&operator*() && noexcept { return *std::move(value_); }
    T *operator->() noexcept { return &*value_; }
    template <typename U> T value_or(U &&other) && { return std::move(value_).value_or(std::forward<U>(other)); }

private:
    std::optional<T> value_;
    std::error_code error_;
};

template <> class [[nodiscard]] expected<void> {
public:
    expected() noexcept = default;
    expected(unexpected error) noexcept : error_(error.error()) {}
    bool has_value() const noexcept { return !error_; }
    explicit operator bool() const noexcept { return has_value(); }
    const std::error_code &error() const noexcept { return error_; }
    void value() const { if (!has_value()) detail::no_value(error_); }

private:
    std::error_code error_;
};
#endif

// ---- Bytes and deadlines --------------------------------------------------------------------------------------------

#ifdef __cpp_lib_span
using std::span;
#else
template <typename T> class span {
public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t N> constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}
    template <typename U, typename = std::enable_if_t<std::is_convertible_v<U (*)[], T (*)[]>>>
    constexpr span(span<U> other) noexcept : data_(other.data()), size_(other.size()) {}
    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t at) const noexcept { return data_[at]; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};
#endif

using bytes = span<const std::byte>;
using writable_bytes = span<std::byte>;

// The bytes of a text, without a terminating 0.
inline bytes as_bytes(std::string_view text) noexcept {
    return {reinterpret_cast<const std::byte *>(text.data()), text.size()};
}
// The bytes of an object, for instance of a number.
template <typename T, typename = std::enable_if_t<std::is_trivially_copyable_v<T> &&
                                                  !std::is_convertible_v<const T &, std::string_view>>>
bytes as_bytes(const T &object) noexcept { return {reinterpret_cast<const std::byte *>(&object), sizeof object}; }
inline std::string_view as_text(bytes of) noexcept { return {reinterpret_cast<const char *>(of.data()), of.size()}; }
// The bytes of a pelton_message, pelton_record or another structure with data and size.
template <typename T> bytes bytes_of(const T &found) noexcept {
    return {static_cast<const std::byte *>(found.data), found.size};
}

// Until when a function waits: a duration from now, a time, `no_wait` or `forever`.
class deadline {
public:
    explicit constexpr deadline(std::int64_t ns) noexcept : ns_(ns) {}
    deadline(std::chrono::steady_clock::time_point time) noexcept
        : ns_(time.time_since_epoch() / std::chrono::nanoseconds(1)) {}
    template <typename R, typename P>
    deadline(std::chrono::duration<R, P> timeout) noexcept
        : ns_(timeout > std::chrono::hours(2000000)
                  ? PELTON_FOREVER
                  : pelton_deadline(std::chrono::duration_cast<std::chrono::nanoseconds>(timeout).count())) {}
    // For deadline_ns of an options structure.
    constexpr std::int64_t ns() const noexcept { return ns_; }

private:
    std::int64_t ns_;
};
inline constexpr deadline no_wait{PELTON_NO_WAIT};
inline constexpr deadline forever{PELTON_FOREVER};

// ---- What the classes below share -----------------------------------------------------------------------------------

namespace detail {

// A C++ function as the context of a C function.
template <typename F> void *context_of(F &function) noexcept {
    return const_cast<void *>(static_cast<const void *>(std::addressof(function)));
}

// A deleter that calls a C function.
template <auto Function> struct calls {
    template <typename T> void operator()(T *handle) const noexcept { (void)Function(handle); }
};

inline std::error_code error_of(int code) noexcept {
    if (code == PELTON_SYSTEM) return {errno, std::system_category()};
    return {code, category()};
}

inline unexpected failed(int code) noexcept { return unexpected(error_of(code)); }

inline expected<void> check(int code) noexcept {
    if (code != PELTON_OK) return failed(code);
    return {};
}

// Calls a function that creates a handle, its last parameter.
template <typename T, typename F, typename... A> expected<T> create(F f, A... rest) noexcept {
    typename T::native_handle_type handle = nullptr;
    if (int code = f(rest..., &handle); code != PELTON_OK) return failed(code);
    return T(handle);
}

// Calls a function that writes a value to its last parameter.
template <typename T, typename F, typename... A> expected<T> get(F f, A... rest) noexcept {
    T value{};
    if (int code = f(rest..., &value); code != PELTON_OK) return failed(code);
    return value;
}

// Calls a function that writes a traceparent; empty if there is none.
template <typename F, typename T> std::string traceparent(F f, const T *handle) {
    char text[PELTON_TRACEPARENT_SIZE];
    return f(handle, text) == 1 ? text : std::string();
}

// A C structure of options with its default values.
template <typename C> struct options : C {
    options() noexcept : C{} { this->struct_bytes = sizeof(C); }
};

} // namespace detail

using channel_options = detail::options<pelton_channel_options>;
using gather_options = detail::options<pelton_gather_options>;
using publisher_options = detail::options<pelton_publisher_options>;
using subscriber_options = detail::options<pelton_subscriber_options>;
using client_options = detail::options<pelton_client_options>;
using service_options = detail::options<pelton_service_options>;
using record_file_options = detail::options<pelton_record_file_options>;
using flush_options = detail::options<pelton_flush_options>;
using appenders_options = detail::options<pelton_appenders_options>;
using engine_options = detail::options<pelton_engine_options>;

// What arm() has done: armed the descriptor, or nothing, as something is there already.
enum class readiness { armed, ready };

template <typename T> class handle {
public:
    using native_handle_type = T *;
    handle() noexcept = default;
    explicit handle(T *native) noexcept : handle_(native) {}
    explicit operator bool() const noexcept { return handle_ != nullptr; }
    T *native_handle() const noexcept { return handle_.get(); }
    // Gives up the C handle, which the caller closes.
    T *release() noexcept { return handle_.release(); }
    expected<void> close() noexcept { return detail::check(pelton_close(release())); }

protected:
    // Call a C function with the handle and these arguments.
    template <typename F, typename... A> expected<void> check(F f, A... rest) const noexcept {
        return detail::check(f(handle_.get(), rest...));
    }
    template <typename V, typename F, typename... A> expected<V> get(F f, A... rest) const noexcept {
        return detail::get<V>(f, handle_.get(), rest...);
    }
    template <typename H, typename F, typename... A> expected<H> create(F f, A... rest) const noexcept {
        return detail::create<H>(f, handle_.get(), rest...);
    }
    template <typename R, typename F, typename... A> expected<R> reserved(F f, std::size_t size, A... rest) {
        void *data = nullptr;
        if (int code = f(handle_.get(), size, rest..., &data); code != PELTON_OK) return detail::failed(code);
        return R(handle_.get(), data, size);
    }
    template <typename F, typename... A> expected<readiness> armed(F f, A... rest) const noexcept {
        int code = f(handle_.get(), rest...);
        if (code < 0) return detail::failed(code);
        return code == PELTON_READY ? readiness::ready : readiness::armed;
    }
    template <typename Info, typename F, typename... A> expected<Info> get_info(F f, A... rest) const noexcept {
        Info info{};
        info.struct_bytes = sizeof info;
        if (int code = f(handle_.get(), rest..., &info); code != PELTON_OK) return detail::failed(code);
        return info;
    }

    std::unique_ptr<T, detail::calls<pelton_close>> handle_;
};

// An open in progress. Poll fd() for reading, and finish() each time, until that does not return PELTON_AGAIN.
template <typename T, auto Fd, auto Finish, typename C> class opening : public handle<C> {
public:
    using handle<C>::handle;
    int fd() const noexcept { return Fd(this->native_handle()); }
    [[nodiscard]] expected<T> finish() noexcept { return detail::create<T>(Finish, this->native_handle()); }
};

// Reserved bytes to write in place; aborted by the destructor unless they were used.
template <typename T, auto Abort> class reserved_bytes {
public:
    std::byte *data() const noexcept { return bytes_.data(); }
    std::size_t size() const noexcept { return bytes_.size(); }
    writable_bytes bytes() const noexcept { return bytes_; }
    expected<void> abort() noexcept { return detail::check(Abort(handle_.release())); }
    reserved_bytes(T *handle, void *data, std::size_t size) noexcept
        : handle_(handle), bytes_(static_cast<std::byte *>(data), size) {}
    reserved_bytes(reserved_bytes &&) noexcept = default;
    reserved_bytes &operator=(reserved_bytes &&) = delete;

protected:
    // After PELTON_TOO_LARGE the reservation remains.
    int used(int code) noexcept {
        if (code != PELTON_TOO_LARGE) handle_.release();
        return code;
    }
    std::unique_ptr<T, detail::calls<Abort>> handle_;
    writable_bytes bytes_;
};

// Reserved bytes for one message.
template <typename T, auto Commit, auto Abort> class reservation : public reserved_bytes<T, Abort> {
public:
    using reserved_bytes<T, Abort>::reserved_bytes;
    // Sends the first size bytes.
    [[nodiscard]] expected<void> commit(std::size_t size) noexcept {
        return detail::check(this->used(Commit(this->handle_.get(), size)));
    }
    [[nodiscard]] expected<void> commit() noexcept { return commit(this->size()); }
};

// ---- Channels -------------------------------------------------------------------------------------------------------

class sender : public handle<pelton_sender> {
public:
    using handle::handle;
    using opening =
        pelton::opening<sender, pelton_sender_opening_fd, pelton_sender_opening_finish, pelton_sender_opening>;
    using reservation = pelton::reservation<pelton_sender, pelton_sender_commit, pelton_sender_abort>;

    [[nodiscard]] static expected<sender> open(const char *name, const channel_options &options = {}) noexcept {
        return detail::create<sender>(pelton_sender_open, name, &options);
    }
    [[nodiscard]] static expected<opening> open_start(const char *name, const channel_options &options = {}) noexcept {
        return detail::create<opening>(pelton_sender_open_start, name, &options);
    }
    [[nodiscard]] expected<void> send(bytes message, deadline until = forever) noexcept {
        return check(pelton_sender_send, message.data(), message.size(), until.ns());
    }
    // With the sender's span, or nullptr: for traceparent() of what receives it, if the channel has the option traced.
    [[nodiscard]] expected<void> send_traced(bytes message, const char *traceparent,
                                             deadline until = forever) noexcept {
        return check(pelton_sender_send_traced, message.data(), message.size(), traceparent, until.ns());
    }
    [[nodiscard]] expected<void> send_batch(span<const iovec> messages, deadline until = forever) noexcept {
        return check(pelton_sender_send_batch, messages.data(), messages.size(), until.ns());
    }
    [[nodiscard]] expected<void> send_descriptors(bytes message, span<const int> fds,
                                                  deadline until = forever) noexcept {
        return check(pelton_sender_send_descriptors, message.data(), message.size(), fds.data(), fds.size(),
                     until.ns());
    }
    [[nodiscard]] expected<reservation> reserve(std::size_t size, deadline until = forever) noexcept {
        return reserved<reservation>(pelton_sender_reserve, size, until.ns());
    }
    [[nodiscard]] expected<reservation> reserve_traced(std::size_t size, const char *traceparent,
                                                       deadline until = forever) noexcept {
        return reserved<reservation>(pelton_sender_reserve_traced, size, traceparent, until.ns());
    }
    [[nodiscard]] expected<void> wait_released(deadline until = forever) noexcept {
        return check(pelton_sender_wait_released, until.ns());
    }
    [[nodiscard]] expected<void> resume(deadline until = forever) noexcept {
        return check(pelton_sender_resume, until.ns());
    }
    [[nodiscard]] expected<void> sync() noexcept { return check(pelton_sender_sync); }
    expected<void> trim() noexcept { return check(pelton_sender_trim); }
    int fd() const noexcept { return pelton_sender_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll(std::size_t size) noexcept { return check(pelton_sender_poll, size); }
    [[nodiscard]] expected<readiness> arm(std::size_t size) noexcept { return armed(pelton_sender_arm, size); }
    [[nodiscard]] expected<void> arm_for_end() noexcept { return check(pelton_sender_arm_for_end); }
    expected<void> disarm() noexcept { return check(pelton_sender_disarm); }
    expected<pelton_sender_info> info() noexcept { return get_info<pelton_sender_info>(pelton_sender_get_info); }
};

// A message kept after its receiver has continued; any thread may read and destroy it.
class held_message : public handle<pelton_held> {
public:
    held_message() noexcept = default;
    held_message(pelton_held *held, pelton::bytes bytes) noexcept : handle(held), bytes_(bytes) {}
    pelton::bytes bytes() const noexcept { return bytes_; }

private:
    pelton::bytes bytes_;
};

// A message in the lane, released by the destructor.
class message {
public:
    message(pelton_receiver *receiver, const pelton_message &received) noexcept
        : receiver_(receiver), received_(received) {}
    message(message &&) noexcept = default;
    message &operator=(message &&) = delete;
    pelton::bytes bytes() const noexcept { return bytes_of(received_); }
    std::uint32_t seq() const noexcept { return received_.seq; }
    std::uint32_t lane() const noexcept { return received_.lane; }
    bool is_redelivered() const noexcept { return (received_.flags & PELTON_REDELIVERED) != 0; }
    std::size_t descriptor_count() const noexcept { return received_.descriptor_count; }
    // The sender's span; empty if the message came without.
    std::string traceparent() const { return detail::traceparent(pelton_receiver_traceparent, receiver_.get()); }
    // Returns how many it wrote to out, which needs space for descriptor_count().
    [[nodiscard]] expected<std::size_t> take_descriptors(span<int> out) noexcept {
        return detail::get<std::size_t>(pelton_receiver_take_descriptors, receiver_.get(), out.data(), out.size());
    }
    expected<void> release() noexcept { return detail::check(pelton_receiver_release(receiver_.release())); }
    // Keeps it while the receiver continues; this message is released.
    [[nodiscard]] expected<held_message> hold() noexcept {
        pelton_held *held = nullptr;
        if (int code = pelton_receiver_hold(receiver_.get(), &held); code != PELTON_OK) return detail::failed(code);
        receiver_.release();
        return held_message(held, bytes());
    }

private:
    std::unique_ptr<pelton_receiver, detail::calls<pelton_receiver_release>> receiver_;
    pelton_message received_;
};

// Several messages in the lane, released together by the destructor.
class message_batch {
public:
    message_batch(pelton_receiver *receiver, span<const pelton_message> received) noexcept
        : receiver_(receiver), received_(received) {}
    message_batch(message_batch &&) noexcept = default;
    message_batch &operator=(message_batch &&) = delete;
    const pelton_message *begin() const noexcept { return received_.data(); }
    const pelton_message *end() const noexcept { return received_.data() + received_.size(); }
    std::size_t size() const noexcept { return received_.size(); }
    // That of the last message: one that has a traceparent is the last of its batch.
    std::string traceparent() const { return detail::traceparent(pelton_receiver_traceparent, receiver_.get()); }
    // As of message: one that has descriptors comes alone.
    [[nodiscard]] expected<std::size_t> take_descriptors(span<int> out) noexcept {
        return detail::get<std::size_t>(pelton_receiver_take_descriptors, receiver_.get(), out.data(), out.size());
    }
    expected<void> release() noexcept { return detail::check(pelton_receiver_release(receiver_.release())); }

private:
    std::unique_ptr<pelton_receiver, detail::calls<pelton_receiver_release>> receiver_;
    span<const pelton_message> received_;
};

// A message, or which sender has joined or left.
struct event {
    pelton_event_kind kind;
    std::uint32_t lane;
    std::uint32_t peer_pid;
    std::uint32_t peer_uid;
    std::optional<pelton::message> message; // of PELTON_MESSAGE
};

// Messages to iterate over, once: each is released before the next is received. The iteration ends with the first
// error.
class message_range {
public:
    struct sentinel {};
    class iterator {
    public:
        explicit iterator(message_range *range) noexcept : range_(range) {}
        message &operator*() const noexcept { return *range_->current_; }
        message *operator->() const noexcept { return &*range_->current_; }
        iterator &operator++() noexcept {
            range_->next();
            return *this;
        }
        bool operator!=(sentinel) const noexcept { return range_->current_.has_value(); }

    private:
        message_range *range_;
    };

    message_range(pelton_receiver *receiver, deadline until) noexcept : receiver_(receiver), until_(until) {}
    iterator begin() noexcept {
        next();
        return iterator(this);
    }
    sentinel end() const noexcept { return {}; }
    // Why it ended: PELTON_CLOSED after the last message, PELTON_AGAIN at the deadline, or an error.
    std::error_code error() const noexcept { return error_; }

private:
    void next() noexcept {
        pelton_message received;
        current_.reset();
        int code = pelton_receiver_receive(receiver_, until_.ns(), &received);
        if (code == PELTON_OK) current_.emplace(receiver_, received);
        else error_ = detail::error_of(code);
    }
    pelton_receiver *receiver_;
    deadline until_;
    std::optional<message> current_;
    std::error_code error_;
};

// Creates senders for threads of this process; any thread may use it.
class senders : public handle<pelton_senders> {
public:
    using handle::handle;
    [[nodiscard]] expected<pelton::sender> sender() const noexcept {
        return create<pelton::sender>(pelton_senders_sender);
    }
    [[nodiscard]] expected<void> send(bytes message, deadline until = forever) const noexcept {
        return check(pelton_senders_send, message.data(), message.size(), until.ns());
    }
};

class receiver : public handle<pelton_receiver> {
public:
    using handle::handle;
    using opening =
        pelton::opening<receiver, pelton_receiver_opening_fd, pelton_receiver_opening_finish, pelton_receiver_opening>;

    [[nodiscard]] static expected<receiver> open(const char *name, const channel_options &options = {}) noexcept {
        return detail::create<receiver>(pelton_receiver_open, name, &options);
    }
    [[nodiscard]] static expected<opening> open_start(const char *name, const channel_options &options = {}) noexcept {
        return detail::create<opening>(pelton_receiver_open_start, name, &options);
    }
    // name may be nullptr: only senders of this process.
    [[nodiscard]] static expected<receiver> gather(const char *name, const gather_options &options = {}) noexcept {
        return detail::create<receiver>(pelton_receiver_gather, name, &options);
    }
    [[nodiscard]] expected<pelton::senders> senders() noexcept {
        return create<pelton::senders>(pelton_receiver_senders);
    }
    [[nodiscard]] expected<message> receive(deadline until = forever) noexcept {
        pelton_message received;
        if (int code = pelton_receiver_receive(handle_.get(), until.ns(), &received); code != PELTON_OK)
            return detail::failed(code);
        return message(handle_.get(), received);
    }
    message_range messages(deadline until = forever) noexcept { return {handle_.get(), until}; }
    [[nodiscard]] expected<event> receive_event(deadline until = forever) noexcept {
        pelton_event found;
        if (int code = pelton_receiver_receive_event(handle_.get(), until.ns(), &found); code != PELTON_OK)
            return detail::failed(code);
        event event{static_cast<pelton_event_kind>(found.kind), found.lane, found.peer_pid, found.peer_uid, {}};
        if (found.kind == PELTON_MESSAGE) event.message.emplace(handle_.get(), found.message);
        return event;
    }
    // The messages are described in `space`, which outlives the batch.
    [[nodiscard]] expected<message_batch> receive_batch(span<pelton_message> space, deadline until = forever) noexcept {
        std::size_t count = 0;
        int code = pelton_receiver_receive_batch(handle_.get(), until.ns(), space.data(), space.size(), &count);
        if (code != PELTON_OK) return detail::failed(code);
        return message_batch(handle_.get(), {space.data(), count});
    }
    // Returns the message's size. After PELTON_TOO_SMALL the message remains: receive() shows its size.
    [[nodiscard]] expected<std::size_t> receive_copy(writable_bytes buffer, deadline until = forever) noexcept {
        return get<std::size_t>(pelton_receiver_receive_copy, buffer.data(), buffer.size(), until.ns());
    }
    // That of the message which receive_copy() copied last; empty if it came without.
    std::string traceparent() const { return detail::traceparent(pelton_receiver_traceparent, handle_.get()); }
    [[nodiscard]] expected<void> resume(deadline until = forever) noexcept {
        return check(pelton_receiver_resume, until.ns());
    }
    [[nodiscard]] expected<void> sync() noexcept { return check(pelton_receiver_sync); }
    int fd() const noexcept { return pelton_receiver_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll() noexcept { return check(pelton_receiver_poll); }
    [[nodiscard]] expected<readiness> arm() noexcept { return armed(pelton_receiver_arm); }
    expected<void> disarm() noexcept { return check(pelton_receiver_disarm); }
    expected<pelton_receiver_info> info() noexcept { return get_info<pelton_receiver_info>(pelton_receiver_get_info); }
};

class listener : public handle<pelton_listener> {
public:
    using handle::handle;
    [[nodiscard]] static expected<listener> open(const char *name, const channel_options &options = {}) noexcept {
        return detail::create<listener>(pelton_listener_open, name, &options);
    }
    [[nodiscard]] expected<sender> accept_sender(deadline until = forever) noexcept {
        return create<sender>(pelton_listener_accept_sender, until.ns());
    }
    [[nodiscard]] expected<receiver> accept_receiver(deadline until = forever) noexcept {
        return create<receiver>(pelton_listener_accept_receiver, until.ns());
    }
    int fd() const noexcept { return pelton_listener_fd(handle_.get()); }
};

struct channel {
    pelton::sender sender;
    pelton::receiver receiver;
};

// Both endpoints of a channel between threads of this process.
[[nodiscard]] inline expected<channel> threads(const channel_options &options = {}) noexcept {
    pelton_sender *sender = nullptr;
    pelton_receiver *receiver = nullptr;
    if (int code = pelton_threads(&options, &sender, &receiver); code != PELTON_OK) return detail::failed(code);
    return channel{pelton::sender(sender), pelton::receiver(receiver)};
}

// ---- Broadcast ------------------------------------------------------------------------------------------------------
//
//     auto publisher = pelton::publisher::open("prices");         auto subscriber = pelton::subscriber::open("prices");
//     (void)publisher->wait_subscribers(1);                       while (auto delivery = subscriber->receive())
//     (void)publisher->send(pelton::as_bytes("17"));                  use(delivery->bytes(), delivery->missed());

// A received message, released by the destructor.
template <typename Handle, auto Release> class delivery_of {
public:
    delivery_of(Handle *receiving, const pelton_delivery &received) noexcept
        : receiving_(receiving), received_(received) {}
    delivery_of(delivery_of &&) noexcept = default;
    delivery_of &operator=(delivery_of &&) = delete;
    pelton::bytes bytes() const noexcept { return bytes_of(received_); }
    std::uint64_t number() const noexcept { return received_.number; }
    std::uint64_t missed() const noexcept { return received_.missed; }
    expected<void> release() noexcept { return detail::check(Release(receiving_.release())); }

private:
    std::unique_ptr<Handle, detail::calls<Release>> receiving_;
    pelton_delivery received_;
};
using delivery = delivery_of<pelton_subscriber, pelton_subscriber_release>;

class subscriber : public handle<pelton_subscriber> {
public:
    using handle::handle;
    using opening = pelton::opening<subscriber, pelton_subscriber_opening_fd, pelton_subscriber_opening_finish,
                                    pelton_subscriber_opening>;

    [[nodiscard]] static expected<subscriber> open(const char *name, const subscriber_options &options = {}) noexcept {
        return detail::create<subscriber>(pelton_subscriber_open, name, &options);
    }
    [[nodiscard]] static expected<opening> open_start(const char *name,
                                                      const subscriber_options &options = {}) noexcept {
        return detail::create<opening>(pelton_subscriber_open_start, name, &options);
    }
    [[nodiscard]] expected<delivery> receive(deadline until = forever) noexcept {
        pelton_delivery received;
        if (int code = pelton_subscriber_receive(handle_.get(), until.ns(), &received); code != PELTON_OK)
            return detail::failed(code);
        return delivery(handle_.get(), received);
    }
    [[nodiscard]] expected<void> resume(deadline until = forever) noexcept {
        return check(pelton_subscriber_resume, until.ns());
    }
    int fd() const noexcept { return pelton_subscriber_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll() noexcept { return check(pelton_subscriber_poll); }
    [[nodiscard]] expected<readiness> arm() noexcept { return armed(pelton_subscriber_arm); }
    expected<void> disarm() noexcept { return check(pelton_subscriber_disarm); }
    expected<pelton_subscriber_info> info() noexcept {
        return get_info<pelton_subscriber_info>(pelton_subscriber_get_info);
    }
};

// What a set has received: a message, or the end of a publisher.
struct subscriber_event {
    pelton_subscriber *from; // native_handle() of the subscriber
    std::optional<delivery_of<pelton_subscriber_set, pelton_subscriber_set_release>> delivery;
    std::error_code left;    // without a delivery: why the publisher has left. The subscriber is out of the set
};

// One thread receives from the subscribers of many publishers. Destroy it before its subscribers: a subscriber that it
// has is not closed by its destructor.
//
//     auto set = pelton::subscriber_set::open();
//     (void)set->add(*bids), (void)set->add(*offers);
//     while (auto event = set->receive())
//         if (event->delivery) use(event->from == bids->native_handle(), event->delivery->bytes());
class subscriber_set : public handle<pelton_subscriber_set> {
public:
    using handle::handle;
    [[nodiscard]] static expected<subscriber_set> open(pelton_wait wait = PELTON_BLOCK) noexcept {
        return detail::create<subscriber_set>(pelton_subscriber_set_open, std::uint32_t{wait});
    }
    [[nodiscard]] expected<void> add(subscriber &member) noexcept {
        return check(pelton_subscriber_set_add, member.native_handle());
    }
    expected<void> remove(subscriber &member) noexcept {
        return check(pelton_subscriber_set_remove, member.native_handle());
    }
    // PELTON_AGAIN: nothing is there; with `forever`, the set is empty.
    [[nodiscard]] expected<subscriber_event> receive(deadline until = forever) noexcept {
        subscriber_event event{};
        pelton_delivery received;
        int code = pelton_subscriber_set_receive(handle_.get(), until.ns(), &event.from, &received);
        if (code == PELTON_OK) event.delivery.emplace(handle_.get(), received);
        else if (event.from) event.left = detail::error_of(code);
        else return detail::failed(code);
        return event;
    }
    int fd() const noexcept { return pelton_subscriber_set_fd(handle_.get()); }
    [[nodiscard]] expected<readiness> arm() noexcept { return armed(pelton_subscriber_set_arm); }
    expected<void> disarm() noexcept { return check(pelton_subscriber_set_disarm); }
    expected<pelton_subscriber_info> info(const subscriber &member) noexcept {
        return get_info<pelton_subscriber_info>(pelton_subscriber_set_get_info, member.native_handle());
    }
};

// Removes a durable subscription of "path:DIR" that no process uses.
[[nodiscard]] inline expected<void> remove_subscription(const char *name, const char *durable) noexcept {
    return detail::check(pelton_subscription_remove(name, durable));
}

class publisher : public handle<pelton_publisher> {
public:
    using handle::handle;
    // name may be nullptr: only threads of this process subscribe.
    [[nodiscard]] static expected<publisher> open(const char *name, const publisher_options &options = {}) noexcept {
        return detail::create<publisher>(pelton_publisher_open, name, &options);
    }
    [[nodiscard]] expected<pelton::subscriber> subscriber(const subscriber_options &options = {}) noexcept {
        return create<pelton::subscriber>(pelton_publisher_subscriber, &options);
    }
    [[nodiscard]] expected<void> send(bytes message, deadline until = forever) noexcept {
        return check(pelton_publisher_send, message.data(), message.size(), until.ns());
    }
    [[nodiscard]] expected<void> wait_subscribers(std::size_t count, deadline until = forever) noexcept {
        return check(pelton_publisher_wait_subscribers, count, until.ns());
    }
    [[nodiscard]] expected<void> wait_released(deadline until = forever) noexcept {
        return check(pelton_publisher_wait_released, until.ns());
    }
    // Returns how many it wrote to out: there are at most 64.
    [[nodiscard]] expected<std::size_t> subscribers(span<pelton_subscriber_state> out) noexcept {
        return get<std::size_t>(pelton_publisher_subscribers, out.data(), out.size());
    }
    int fd() const noexcept { return pelton_publisher_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll(std::size_t size) noexcept { return check(pelton_publisher_poll, size); }
    [[nodiscard]] expected<readiness> arm(std::size_t size) noexcept { return armed(pelton_publisher_arm, size); }
    expected<void> disarm() noexcept { return check(pelton_publisher_disarm); }
    expected<pelton_publisher_info> info() noexcept {
        return get_info<pelton_publisher_info>(pelton_publisher_get_info);
    }
};

// ---- Calls ----------------------------------------------------------------------------------------------------------
//
//     auto client = pelton::client::open("echo");                    auto service = pelton::service::open("echo");
//     auto reply = client->call(pelton::as_bytes("hello"), 1s);      while (auto request = service->receive())
//     if (reply) use(reply->bytes());                              (void)request->responder().reply(request->bytes());

// A completion in the lane, released by the destructor.
class completion {
public:
    completion(pelton_client *client, const pelton_completion &taken) noexcept : client_(client), taken_(taken) {}
    completion(completion &&) noexcept = default;
    completion &operator=(completion &&) = delete;
    std::uint64_t call() const noexcept { return taken_.call; }
    pelton_outcome outcome() const noexcept { return static_cast<pelton_outcome>(taken_.outcome); }
    std::uint32_t code() const noexcept { return taken_.code; }
    pelton::bytes bytes() const noexcept { return bytes_of(taken_); }
    expected<void> release() noexcept { return detail::check(pelton_client_release(client_.release())); }

private:
    std::unique_ptr<pelton_client, detail::calls<pelton_client_release>> client_;
    pelton_completion taken_;
};

// Reserved bytes for a request.
class request_reservation : public reserved_bytes<pelton_client, pelton_client_abort> {
public:
    using reserved_bytes::reserved_bytes;
    // Submits the first size bytes. Returns the call's number.
    [[nodiscard]] expected<std::uint64_t> submit(std::size_t size, std::uint32_t flags = 0) noexcept {
        std::uint64_t call = 0;
        if (int code = used(pelton_client_submit_reserved(handle_.get(), size, flags, &call)); code != PELTON_OK)
            return detail::failed(code);
        return call;
    }
};

class client : public handle<pelton_client> {
public:
    using handle::handle;
    using opening =
        pelton::opening<client, pelton_client_opening_fd, pelton_client_opening_finish, pelton_client_opening>;

    [[nodiscard]] static expected<client> open(const char *name, const client_options &options = {}) noexcept {
        return detail::create<client>(pelton_client_open, name, &options);
    }
    [[nodiscard]] static expected<opening> open_start(const char *name, const client_options &options = {}) noexcept {
        return detail::create<opening>(pelton_client_open_start, name, &options);
    }
    [[nodiscard]] expected<completion> call(bytes request, deadline until = forever) noexcept {
        pelton_completion taken;
        return completed(pelton_client_call(handle_.get(), request.data(), request.size(), until.ns(), &taken), taken);
    }
    // Returns the call's number. flags: PELTON_IDEMPOTENT, or 0.
    [[nodiscard]] expected<std::uint64_t> submit(bytes request, deadline until = forever,
                                                 std::uint32_t flags = 0) noexcept {
        return get<std::uint64_t>(pelton_client_submit, request.data(), request.size(), flags, until.ns());
    }
    // With the span of which the call is a part, or nullptr.
    [[nodiscard]] expected<std::uint64_t> submit_traced(bytes request, const char *traceparent,
                                                        deadline until = forever, std::uint32_t flags = 0) noexcept {
        return get<std::uint64_t>(pelton_client_submit_traced, request.data(), request.size(), traceparent, flags,
                                  until.ns());
    }
    [[nodiscard]] expected<void> notify(bytes message, deadline until = forever) noexcept {
        return check(pelton_client_notify, message.data(), message.size(), until.ns());
    }
    [[nodiscard]] expected<request_reservation> reserve(std::size_t size, deadline until = forever) noexcept {
        return reserved<request_reservation>(pelton_client_reserve, size, until.ns());
    }
    [[nodiscard]] expected<completion> await(deadline until = forever) noexcept {
        pelton_completion taken;
        return completed(pelton_client_await(handle_.get(), until.ns(), &taken), taken);
    }
    [[nodiscard]] expected<completion> await_call(std::uint64_t call, deadline until = forever) noexcept {
        pelton_completion taken;
        return completed(pelton_client_await_call(handle_.get(), call, until.ns(), &taken), taken);
    }
    expected<void> cancel(std::uint64_t call) noexcept { return check(pelton_client_cancel, call); }
    int fd() const noexcept { return pelton_client_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll() noexcept { return check(pelton_client_poll); }
    [[nodiscard]] expected<readiness> arm() noexcept { return armed(pelton_client_arm); }
    expected<void> disarm() noexcept { return check(pelton_client_disarm); }
    expected<pelton_client_info> info() noexcept { return get_info<pelton_client_info>(pelton_client_get_info); }

private:
    expected<completion> completed(int code, const pelton_completion &taken) noexcept {
        if (code != PELTON_OK) return detail::failed(code);
        return completion(handle_.get(), taken);
    }
};

class reply_reservation;

// Replies to one call, on any thread. Its final reply, or its destructor, closes it: then it is empty.
class responder : public handle<pelton_responder> {
public:
    using handle::handle;
    [[nodiscard]] expected<void> reply(bytes reply) noexcept {
        return final(pelton_responder_reply(handle_.get(), reply.data(), reply.size()));
    }
    [[nodiscard]] expected<void> fail(std::uint32_t code, bytes reason) noexcept {
        return final(pelton_responder_fail(handle_.get(), code, reason.data(), reason.size()));
    }
    expected<void> end() noexcept { return final(pelton_responder_end(handle_.get())); }
    [[nodiscard]] expected<void> part(bytes part, deadline until = forever) noexcept {
        return check(pelton_responder_part, part.data(), part.size(), until.ns());
    }
    // The responder must not be moved before the reservation is used.
    [[nodiscard]] expected<reply_reservation> reserve(std::size_t size) noexcept;
    // The traceparent of the request; empty if it came without.
    std::string traceparent() const { return detail::traceparent(pelton_responder_traceparent, handle_.get()); }
    bool is_cancelled() const noexcept { return pelton_responder_is_cancelled(handle_.get()) == 1; }

private:
    friend class reply_reservation;
    // These codes leave the responder open.
    expected<void> final(int code) noexcept {
        if (code != PELTON_TOO_LARGE && code != PELTON_RESERVED && code != PELTON_NOT_RESERVED && code != PELTON_NULL &&
            code != PELTON_WRONG_THREAD && code != PELTON_FORKED && code != PELTON_INTERNAL)
            release();
        return detail::check(code);
    }
};

// Reserved bytes for a reply, or a part of one.
class reply_reservation : public reserved_bytes<pelton_responder, pelton_responder_abort> {
public:
    reply_reservation(responder *owner, void *data, std::size_t size) noexcept
        : reserved_bytes(owner->native_handle(), data, size), owner_(owner) {}
    // Replies with the first size bytes, and ends the call.
    [[nodiscard]] expected<void> reply(std::size_t size) noexcept {
        return owner_->final(used(pelton_responder_reply_reserved(handle_.get(), size)));
    }
    // Sends the first size bytes as a part.
    [[nodiscard]] expected<void> part(std::size_t size) noexcept {
        return detail::check(used(pelton_responder_part_reserved(handle_.get(), size)));
    }

private:
    responder *owner_;
};

inline expected<reply_reservation> responder::reserve(std::size_t size) noexcept {
    void *data = nullptr;
    if (int code = pelton_responder_reserve(handle_.get(), size, &data); code != PELTON_OK) return detail::failed(code);
    return reply_reservation(this, data, size);
}

// A request in the lane, released by the destructor. Move its responder elsewhere to reply later.
class request {
public:
    request(pelton_service *service, const pelton_request &received) noexcept
        : service_(service), received_(received), responder_(received.responder) {}
    request(request &&) noexcept = default;
    request &operator=(request &&) = delete;
    pelton::bytes bytes() const noexcept { return bytes_of(received_); }
    bool is_notification() const noexcept { return received_.responder == nullptr; }
    pelton::responder &responder() noexcept { return responder_; }
    pelton::deadline deadline() const noexcept { return pelton::deadline(received_.deadline_ns); }
    std::uint32_t pid() const noexcept { return received_.pid; }
    std::uint32_t uid() const noexcept { return received_.uid; }
    expected<void> release() noexcept { return detail::check(pelton_service_release(service_.release())); }

private:
    std::unique_ptr<pelton_service, detail::calls<pelton_service_release>> service_;
    pelton_request received_;
    pelton::responder responder_;
};

class service : public handle<pelton_service> {
public:
    using handle::handle;
    [[nodiscard]] static expected<service> open(const char *name, const service_options &options = {}) noexcept {
        return detail::create<service>(pelton_service_open, name, &options);
    }
    [[nodiscard]] expected<request> receive(deadline until = forever) noexcept {
        pelton_request received;
        if (int code = pelton_service_receive(handle_.get(), until.ns(), &received); code != PELTON_OK)
            return detail::failed(code);
        return request(handle_.get(), received);
    }
    // Calls handler(request) on so many threads at the same time. The request's bytes are valid until it returns. An
    // exception of the handler ends the program.
    template <typename F, typename = std::enable_if_t<std::is_invocable_v<F &, request>>>
    [[nodiscard]] expected<void> run(std::uint32_t threads, F &handler) noexcept {
        auto call = [](void *context, const pelton_request *received) noexcept {
            (*static_cast<F *>(context))(request(nullptr, *received));
        };
        return check(pelton_service_run, threads, call, detail::context_of(handler));
    }
    // Any thread, before the service is closed.
    expected<void> stop() const noexcept { return check(pelton_service_stop); }
    expected<void> drain() const noexcept { return check(pelton_service_drain); }
    int fd() const noexcept { return pelton_service_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll() noexcept { return check(pelton_service_poll); }
    [[nodiscard]] expected<readiness> arm() noexcept { return armed(pelton_service_arm); }
    expected<void> disarm() noexcept { return check(pelton_service_disarm); }
    expected<pelton_service_info> info() noexcept { return get_info<pelton_service_info>(pelton_service_get_info); }
};

// ---- Flushing -------------------------------------------------------------------------------------------------------

// The records of a chunk: `for (const pelton_record &record : pelton::records_of(chunk))`.
class records_of {
public:
    struct sentinel {};
    class iterator {
    public:
        explicit iterator(const pelton_chunk *chunk) noexcept : chunk_(chunk) { ++*this; }
        const pelton_record &operator*() const noexcept { return record_; }
        iterator &operator++() noexcept {
            is_found_ = pelton_chunk_next(chunk_, &at_, &record_) != 0;
            return *this;
        }
        bool operator!=(sentinel) const noexcept { return is_found_; }

    private:
        const pelton_chunk *chunk_;
        std::size_t at_ = 0;
        pelton_record record_{};
        bool is_found_ = false;
    };

    explicit records_of(const pelton_chunk &chunk) noexcept : chunk_(&chunk) {}
    iterator begin() const noexcept { return iterator(chunk_); }
    sentinel end() const noexcept { return {}; }

private:
    const pelton_chunk *chunk_;
};

namespace detail {
// A pelton_write for a C++ function, its context.
template <typename F> int write(void *context, const pelton_chunk *chunks, std::size_t count) noexcept {
    return (*static_cast<F *>(context))(span<const pelton_chunk>(chunks, count));
}
template <typename F> inline constexpr bool is_writer = std::is_invocable_r_v<int, F &, span<const pelton_chunk>>;
} // namespace detail

// A function to flush to is called as write(span<const pelton_chunk>) and returns an int, as a pelton_write. It
// outlives the flush or the appenders. If it throws, the program ends.
class flush : public handle<pelton_flush> {
public:
    using handle::handle;
    // If it fails, the receiver is unchanged.
    [[nodiscard]] static expected<flush> to_record_file(receiver &&from, const char *path,
                                                        const record_file_options &file = {},
                                                        const flush_options &options = {}) noexcept {
        return taken(std::move(from), detail::create<flush>(pelton_flush_to_record_file, from.native_handle(), path,
                                                            &file, &options));
                                          }
    template <typename F, typename = std::enable_if_t<detail::is_writer<F>>>
    [[nodiscard]] static expected<flush> to_function(receiver &&from, F &write,
                                                     const flush_options &options = {}) noexcept {
        return taken(std::move(from),
                     detail::create<flush>(pelton_flush_to_function, from.native_handle(), detail::write<F>,
                                           detail::context_of(write), &options));
    }
    [[nodiscard]] expected<void> run(deadline until = forever) noexcept { return check(pelton_flush_run, until.ns()); }
    [[nodiscard]] expected<void> flush_now() noexcept { return check(pelton_flush_flush); }
    [[nodiscard]] expected<void> sync() noexcept { return check(pelton_flush_sync); }

private:
    static expected<flush> taken(receiver &&from, expected<flush> made) noexcept {
        if (made) from.release();
        return made;
    }
};

class appender : public handle<pelton_appender> {
public:
    using handle::handle;
    using reservation = pelton::reservation<pelton_appender, pelton_appender_commit, pelton_appender_abort>;
    [[nodiscard]] expected<void> append(bytes message) noexcept {
        return check(pelton_appender_append, message.data(), message.size());
    }
    [[nodiscard]] expected<reservation> reserve(std::size_t size) noexcept {
        return reserved<reservation>(pelton_appender_reserve, size);
    }
};

// Creates appenders for threads; any thread may use it.
class appenders : public handle<pelton_appenders> {
public:
    using handle::handle;
    [[nodiscard]] static expected<appenders> to_record_file(const char *path, const record_file_options &file = {},
                                              const appenders_options &options = {}) noexcept {
        return detail::create<appenders>(pelton_appenders_to_record_file, path, &file, &options);
                                              }
    template <typename F, typename = std::enable_if_t<detail::is_writer<F>>>
    [[nodiscard]] static expected<appenders> to_function(F &write, const appenders_options &options = {}) noexcept {
        return detail::create<appenders>(pelton_appenders_to_function, detail::write<F>, detail::context_of(write),
                                         &options);
    }
    [[nodiscard]] expected<pelton::appender> appender() const noexcept {
        return create<pelton::appender>(pelton_appenders_appender);
    }
    [[nodiscard]] expected<void> append(bytes message) const noexcept {
        return check(pelton_appenders_append, message.data(), message.size());
    }
    [[nodiscard]] expected<void> flush() const noexcept { return check(pelton_appenders_flush); }
    [[nodiscard]] expected<void> sync() const noexcept { return check(pelton_appenders_sync); }
};

// Reads a record file: `while (auto record = records->next()) use(pelton::bytes_of(*record));`.
class records : public handle<pelton_records> {
public:
    using handle::handle;
    [[nodiscard]] static expected<records> open(const char *path) noexcept {
        return detail::create<records>(pelton_records_open, path);
    }
    // Its data is valid until the next call.
    [[nodiscard]] expected<pelton_record> next() noexcept { return get<pelton_record>(pelton_records_next); }
};

// ---- Files ----------------------------------------------------------------------------------------------------------

// `auto read = pelton::operation(PELTON_FILE_READ); read.file = file.native_handle();`.
inline pelton_operation operation(pelton_file_operation kind) noexcept {
    pelton_operation operation{};
    operation.kind = kind;
    return operation;
}

class file : public handle<pelton_file> {
public:
    using handle::handle;
    [[nodiscard]] static expected<file> from_fd(int fd, const char *name) noexcept {
        return detail::create<file>(pelton_file_from_fd, fd, name);
    }
    int fd() const noexcept { return pelton_file_fd(handle_.get()); }
};

class engine : public handle<pelton_engine> {
public:
    using handle::handle;
    [[nodiscard]] static expected<engine> open(const engine_options &options = {}) noexcept {
        return detail::create<engine>(pelton_engine_open, &options);
    }
    // PELTON_FILE_OPEN: open_file().
    [[nodiscard]] expected<pelton_file_completion> run(const pelton_operation &operation,
                                                       deadline until = forever) noexcept {
        return get<pelton_file_completion>(pelton_engine_run, &operation, until.ns());
    }
    // Runs a PELTON_FILE_OPEN.
    [[nodiscard]] expected<file> open_file(const pelton_operation &operation, deadline until = forever) noexcept {
        auto done = run(operation, until);
        if (!done) return unexpected(done.error());
        return file(done->file);
    }
    // accepted is how many were, whatever is returned.
    [[nodiscard]] expected<void> submit(span<const pelton_operation> operations, std::size_t &accepted) noexcept {
        accepted = 0;
        return check(pelton_engine_submit, operations.data(), operations.size(), &accepted);
    }
    // Returns the completions in `space`.
    [[nodiscard]] expected<span<pelton_file_completion>> completions(span<pelton_file_completion> space,
                                                       deadline until = forever) noexcept {
        std::size_t count = 0;
        int code = pelton_engine_completions(handle_.get(), until.ns(), space.data(), space.size(), &count);
        if (code != PELTON_OK) return detail::failed(code);
        return span<pelton_file_completion>(space.data(), count);
    }
    expected<void> cancel(std::uint64_t token) noexcept { return check(pelton_engine_cancel, token); }
    [[nodiscard]] expected<void> wait_idle(deadline until = forever) noexcept {
        return check(pelton_engine_wait_idle, until.ns());
    }
    int fd() const noexcept { return pelton_engine_fd(handle_.get()); }
    [[nodiscard]] expected<void> poll() noexcept { return check(pelton_engine_poll); }
    [[nodiscard]] expected<readiness> arm() noexcept { return armed(pelton_engine_arm); }
    expected<void> disarm() noexcept { return check(pelton_engine_disarm); }
    expected<pelton_engine_info> info() noexcept { return get_info<pelton_engine_info>(pelton_engine_get_info); }
};

} // namespace PELTON_CXX_
} // namespace pelton

#undef PELTON_CXX_

#endif
