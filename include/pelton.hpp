// pelton.hpp: pelton.h for C++17. Header-only: each function is the one of the same word in pelton.h, which says what it does, whether it
// waits, its errors and units; here is what C++ adds. Nothing throws and nothing allocates; with -fno-exceptions -fno-rtti it is the same.
//
//     auto sender = pelton::sender::open("events");                  auto listener = pelton::listener::listen("events");
//     if (!sender) report(sender.text(), pelton::error_detail());    auto receiver = listener->accept_receiver();
//     auto sent = sender->send("hello");                             while (auto message = receiver->receive()) {
//     if (sent.is_again()) ... full, with a deadline                     use(message->data(), message->size());
//                                                                    }
//
// Who owns what. sender, receiver, listener, held, flush, appenders, appender, records, client, service, responder, engine and file are
// handles: moved, not copied, closed when destroyed; one moved from, or from a result that is an error, is empty, and answers
// PELTON_NULL. message, messages, completion, request, reservation, request_reservation and reply_reservation are what a handle has
// given out for a while: destroyed, they release or abort it. Each ends before its handle closes, and before the next of its kind: let
// its scope be the loop's, as above. They can be returned and passed on, but not assigned to.
#ifndef PELTON_HPP
#define PELTON_HPP

#include "pelton.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

namespace pelton {

// Deadlines.
inline constexpr std::int64_t no_wait = PELTON_NO_WAIT;
inline constexpr std::int64_t forever = PELTON_FOREVER;
inline std::int64_t deadline(std::chrono::nanoseconds timeout) noexcept { return pelton_deadline(timeout.count()); }

inline std::uint32_t version() noexcept { return pelton_version(); }
inline const char *error_detail() noexcept { return pelton_error_detail(); }

// What a function answered: true for PELTON_OK.
class [[nodiscard]] answer {
public:
    constexpr answer(int code) noexcept : code_(code) {}
    constexpr explicit operator bool() const noexcept { return code_ == PELTON_OK; }
    constexpr bool is_again() const noexcept { return code_ == PELTON_AGAIN; }
    constexpr int code() const noexcept { return code_; }
    const char *text() const noexcept { return pelton_code_text(code_); }

private:
    int code_;
};

// An answer and what came with it: with another answer than PELTON_OK it is empty, or what the function says.
template <typename T> class [[nodiscard]] result : public answer {
public:
    result(int code) noexcept : answer(code), value_() {}
    result(int code, T &&value) noexcept : answer(code), value_(std::move(value)) {}
    T &operator*() & noexcept { return value_; }
    T &&operator*() && noexcept { return std::move(value_); }
    T *operator->() noexcept { return &value_; }

private:
    T value_;
};

// Bytes that somebody else keeps.
class bytes {
public:
    constexpr bytes() noexcept = default;
    constexpr bytes(const void *data, std::size_t size) noexcept : data_(data), size_(size) {}
    // A string, literal, or std::string_view.
    template <typename T, typename = std::enable_if_t<std::is_convertible_v<const T &, std::string_view>>>
    constexpr bytes(const T &text) noexcept : data_(std::string_view(text).data()), size_(std::string_view(text).size()) {}
    constexpr const void *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    const unsigned char *begin() const noexcept { return static_cast<const unsigned char *>(data_); }
    const unsigned char *end() const noexcept { return begin() + size_; }
    std::string_view text() const noexcept { return {static_cast<const char *>(data_), size_}; }

private:
    const void *data_ = nullptr;
    std::size_t size_ = 0;
};

// pelton_options with its defaults: `pelton::options options; options.capacity = 1 << 20;`.
struct options : pelton_options {
    options() noexcept : pelton_options{} { struct_bytes = sizeof(pelton_options); }
};

// A handle of pelton.h's that closes itself, and what several kinds have in common. Not to be named.
template <typename T> class owned {
public:
    owned() noexcept = default;
    explicit owned(T *handle) noexcept : handle_(handle) {}
    owned(owned &&other) noexcept : handle_(other.detach()) {}
    owned &operator=(owned &&other) noexcept {
        if (this != &other) {
            pelton_close(handle_);
            handle_ = other.detach();
        }
        return *this;
    }
    ~owned() { pelton_close(handle_); }
    // Closes now, and is empty.
    answer close() noexcept { return pelton_close(detach()); }
    // For pelton.h's functions, and pelton_uv.h's.
    T *get() const noexcept { return handle_; }
    // Gives the handle up: it is the caller's to close.
    T *detach() noexcept { return std::exchange(handle_, nullptr); }
    // Whether it is not empty.
    explicit operator bool() const noexcept { return handle_ != nullptr; }

protected:
    int fd() const noexcept { return pelton_fd(handle_); }
    answer arm() noexcept { return pelton_arm(handle_); }
    answer disarm() noexcept { return pelton_disarm(handle_); }
    result<pelton_info> info() const noexcept {
        pelton_info info{};
        info.struct_bytes = sizeof info;
        int code = pelton_get_info(handle_, &info);
        return {code, std::move(info)};
    }
    answer resume(std::int64_t deadline_ns = forever) noexcept { return pelton_resume(handle_, deadline_ns); }
    answer sync() const noexcept { return pelton_sync(handle_); }
    answer flush_now() const noexcept { return pelton_flush_now(handle_); }
    template <typename R> result<R> reserved(std::size_t size, std::int64_t deadline_ns) noexcept {
        void *at = nullptr;
        int code = pelton_reserve(handle_, size, deadline_ns, &at);
        if (code != PELTON_OK) return code;
        return {code, R(handle_, at, size)};
    }

    T *handle_ = nullptr;
};

// What a handle has given out, and gets back by Back. Not to be named.
template <typename T, int (*Back)(void *)> class lent {
public:
    lent() noexcept = default;
    lent(lent &&other) noexcept : handle_(other.taken()) {}
    lent &operator=(lent &&) = delete;
    ~lent() {
        if (handle_) Back(handle_);
    }

protected:
    explicit lent(T *handle) noexcept : handle_(handle) {}
    T *taken() noexcept { return std::exchange(handle_, nullptr); }
    // Gives it back before the end; once.
    answer back() noexcept { return Back(taken()); }
    T *handle_ = nullptr;
};

// ---- Sending --------------------------------------------------------------------------------------------------------------

// Room in a lane, aborted unless it is used. Not to be named.
template <typename T> class room : protected lent<T, pelton_abort> {
public:
    unsigned char *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    answer abort() noexcept { return this->back(); }

protected:
    room() noexcept = default;
    room(T *handle, void *data, std::size_t size) noexcept
        : lent<T, pelton_abort>(handle), data_(static_cast<unsigned char *>(data)), size_(size) {}
    // What using it has answered. With PELTON_TOO_LARGE it is as before.
    int used(int code) noexcept {
        if (code != PELTON_TOO_LARGE) this->taken();
        return code;
    }
    unsigned char *data_ = nullptr;
    std::size_t size_ = 0;
};

// Room for a message of a sender or an appender.
class reservation : public room<void> {
public:
    reservation() noexcept = default;
    // Commits the first size bytes.
    answer commit(std::size_t size) noexcept { return used(pelton_commit(handle_, size)); }
    answer commit() noexcept { return commit(size_); }

private:
    template <typename> friend class owned;
    using room::room;
};

class sender : public owned<pelton_sender> {
public:
    using owned::owned;
    static result<sender> open(const char *name, const options &options = {}) noexcept {
        pelton_sender *opened = nullptr;
        int code = pelton_sender_open(name, &options, &opened);
        return {code, sender(opened)};
    }
    answer send(bytes payload, std::int64_t deadline_ns = forever) noexcept {
        return pelton_send(handle_, payload.data(), payload.size(), deadline_ns);
    }
    answer send_batch(const iovec *messages, std::size_t count, std::int64_t deadline_ns = forever) noexcept {
        return pelton_send_batch(handle_, messages, count, deadline_ns);
    }
    result<reservation> reserve(std::size_t size, std::int64_t deadline_ns = forever) noexcept {
        return reserved<reservation>(size, deadline_ns);
    }
    answer send_descriptors(bytes payload, const int *fds, std::size_t count, std::int64_t deadline_ns = forever) noexcept {
        return pelton_send_descriptors(handle_, payload.data(), payload.size(), fds, count, deadline_ns);
    }
    answer drain(std::int64_t deadline_ns = forever) noexcept { return pelton_drain(handle_, deadline_ns); }
    answer trim() noexcept { return pelton_trim(handle_); }
    answer arm_send(std::size_t size) noexcept { return pelton_arm_send(handle_, size); }
    using owned::arm, owned::disarm, owned::fd, owned::info, owned::resume, owned::sync;
};

// ---- Receiving ------------------------------------------------------------------------------------------------------------

// A message kept: read and destroyed on any thread.
class held {
public:
    held() noexcept = default;
    held(held &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)), payload_(other.payload_) {}
    held &operator=(held &&other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(payload_, other.payload_);
        return *this;
    }
    ~held() { pelton_close(handle_); }
    bytes payload() const noexcept { return payload_; }
    const void *data() const noexcept { return payload_.data(); }
    std::size_t size() const noexcept { return payload_.size(); }

private:
    friend class message;
    held(pelton_held *handle, bytes payload) noexcept : handle_(handle), payload_(payload) {}
    pelton_held *handle_ = nullptr;
    bytes payload_;
};

// A message in place, released when destroyed.
class message : lent<pelton_receiver, pelton_release> {
public:
    message() noexcept = default;
    bytes payload() const noexcept { return {message_.data, message_.size}; }
    const void *data() const noexcept { return message_.data; }
    std::size_t size() const noexcept { return message_.size; }
    std::uint32_t seq() const noexcept { return message_.seq; }
    std::uint32_t lane() const noexcept { return message_.lane; }
    bool is_redelivered() const noexcept { return (message_.flags & PELTON_REDELIVERED) != 0; }
    // PELTON_JOINED and the like, if it is no message, else 0.
    std::uint32_t tells() const noexcept { return message_.flags & PELTON_TELLS; }
    std::uint32_t descriptors() const noexcept { return message_.descriptors; }
    // How many were taken; with PELTON_TOO_SMALL, how many there are.
    result<std::size_t> take_descriptors(int *out, std::size_t capacity) noexcept {
        std::size_t count = 0;
        int code = pelton_take_descriptors(handle_, out, capacity, &count);
        return {code, std::move(count)};
    }
    answer release() noexcept { return back(); }
    // Keeps it and lets the receiver go on: this is empty then.
    result<held> hold() noexcept {
        pelton_held *kept = nullptr;
        int code = pelton_hold(handle_, &kept);
        if (code != PELTON_OK) return code;
        taken();
        return {code, held(kept, payload())};
    }

private:
    friend class receiver;
    message(pelton_receiver *receiver, const pelton_message &found) noexcept : lent(receiver), message_(found) {}
    pelton_message message_{};
};

// Several messages in place, released together when destroyed.
class messages : lent<pelton_receiver, pelton_release> {
public:
    messages() noexcept = default;
    const pelton_message *begin() const noexcept { return first_; }
    const pelton_message *end() const noexcept { return first_ + count_; }
    std::size_t size() const noexcept { return count_; }
    // As message::take_descriptors: a message that has any comes alone.
    result<std::size_t> take_descriptors(int *out, std::size_t capacity) noexcept {
        std::size_t count = 0;
        int code = pelton_take_descriptors(handle_, out, capacity, &count);
        return {code, std::move(count)};
    }
    answer release() noexcept { return back(); }

private:
    friend class receiver;
    messages(pelton_receiver *receiver, const pelton_message *first, std::size_t count) noexcept
        : lent(receiver), first_(first), count_(count) {}
    const pelton_message *first_ = nullptr;
    std::size_t count_ = 0;
};

// Makes senders for threads; used by any number of them at once, but for closing.
class senders : public owned<pelton_senders> {
public:
    using owned::owned;
    result<sender> open() const noexcept {
        pelton_sender *opened = nullptr;
        int code = pelton_senders_open(handle_, &opened);
        return {code, sender(opened)};
    }
    // By the calling thread's own lane.
    answer send(bytes payload, std::int64_t deadline_ns = forever) const noexcept {
        return pelton_senders_send(handle_, payload.data(), payload.size(), deadline_ns);
    }
};

class receiver : public owned<pelton_receiver> {
public:
    using owned::owned;
    // Without a name, of threads of this process.
    static result<receiver> gather(const char *name, const options &options = {}) noexcept {
        pelton_receiver *gathering = nullptr;
        int code = pelton_gather(name, &options, &gathering);
        return {code, receiver(gathering)};
    }
    result<pelton::senders> senders() noexcept {
        pelton_senders *made = nullptr;
        int code = pelton_receiver_senders(handle_, &made);
        return {code, pelton::senders(made)};
    }
    static result<receiver> open(const char *name, const options &options = {}) noexcept {
        pelton_receiver *opened = nullptr;
        int code = pelton_receiver_open(name, &options, &opened);
        return {code, receiver(opened)};
    }
    result<message> receive(std::int64_t deadline_ns = forever) noexcept {
        pelton_message found;
        int code = pelton_receive(handle_, deadline_ns, &found);
        if (code != PELTON_OK) return code;
        return {code, message(handle_, found)};
    }
    // Up to count messages, described in the caller's array, which stays as long as what this answers.
    result<messages> receive_batch(pelton_message *array, std::size_t count, std::int64_t deadline_ns = forever) noexcept {
        std::size_t found = 0;
        int code = pelton_receive_batch(handle_, deadline_ns, array, count, &found);
        if (code != PELTON_OK) return code;
        return {code, messages(handle_, array, found)};
    }
    // The size of what was copied; with PELTON_TOO_SMALL, the size wanted.
    result<std::size_t> receive_copy(void *buffer, std::size_t capacity, std::int64_t deadline_ns = forever) noexcept {
        std::size_t size = 0;
        int code = pelton_receive_copy(handle_, buffer, capacity, deadline_ns, &size);
        return {code, std::move(size)};
    }
    using owned::arm, owned::disarm, owned::fd, owned::info, owned::resume, owned::sync;
};

// ---- Making a channel -----------------------------------------------------------------------------------------------------

class listener : public owned<pelton_listener> {
public:
    using owned::owned;
    static result<listener> listen(const char *name, const options &options = {}) noexcept {
        pelton_listener *listening = nullptr;
        int code = pelton_listen(name, &options, &listening);
        return {code, listener(listening)};
    }
    result<sender> accept_sender(std::int64_t deadline_ns = forever) noexcept {
        pelton_sender *accepted = nullptr;
        int code = pelton_accept_sender(handle_, deadline_ns, &accepted);
        return {code, sender(accepted)};
    }
    result<receiver> accept_receiver(std::int64_t deadline_ns = forever) noexcept {
        pelton_receiver *accepted = nullptr;
        int code = pelton_accept_receiver(handle_, deadline_ns, &accepted);
        return {code, receiver(accepted)};
    }
    using owned::fd;
};

struct both_ends {
    pelton::sender sender;
    pelton::receiver receiver;
};

inline result<both_ends> threads(const options &options = {}) noexcept {
    pelton_sender *sending = nullptr;
    pelton_receiver *receiving = nullptr;
    int code = pelton_threads(&options, &sending, &receiving);
    return {code, both_ends{sender(sending), receiver(receiving)}};
}

// ---- Flushing -------------------------------------------------------------------------------------------------------------

// The records of a run: `for (const pelton_record &record : pelton::records_of(run))`.
class records_of {
public:
    explicit records_of(const pelton_run &run) noexcept : run_(&run) {}
    struct sentinel {};
    class iterator {
    public:
        const pelton_record &operator*() const noexcept { return record_; }
        const pelton_record *operator->() const noexcept { return &record_; }
        iterator &operator++() noexcept {
            found_ = pelton_run_next(run_, &at_, &record_);
            return *this;
        }
        bool operator!=(sentinel) const noexcept { return found_ != 0; }

    private:
        friend class records_of;
        explicit iterator(const pelton_run *run) noexcept : run_(run) { ++*this; }
        const pelton_run *run_;
        std::size_t at_ = 0;
        pelton_record record_{};
        int found_ = 0;
    };
    iterator begin() const noexcept { return iterator(run_); }
    sentinel end() const noexcept { return {}; }

private:
    const pelton_run *run_;
};

// What a callback is given.
class runs {
public:
    runs(const pelton_run *first, std::size_t count) noexcept : first_(first), count_(count) {}
    const pelton_run *begin() const noexcept { return first_; }
    const pelton_run *end() const noexcept { return first_ + count_; }
    std::size_t size() const noexcept { return count_; }

private:
    const pelton_run *first_;
    std::size_t count_;
};

// pelton_sink. `pelton::sink sink("log"); sink.rotate_bytes = 1 << 30;` is a file. `pelton::sink sink(take);` is a callback, something
// that is called with runs, answers an int as pelton_write does, and lives until the flush, or the last of the appenders, is closed;
// what it throws ends the program.
struct sink : pelton_sink {
    explicit sink(const char *file) noexcept : pelton_sink{} {
        struct_bytes = sizeof(pelton_sink);
        path = file;
    }
    template <typename F, typename = std::enable_if_t<std::is_invocable_r_v<int, F &, runs>>>
    explicit sink(F &callback) noexcept : pelton_sink{} {
        struct_bytes = sizeof(pelton_sink);
        context = const_cast<void *>(static_cast<const void *>(std::addressof(callback)));
        write = [](void *given, const pelton_run *first, std::size_t count) noexcept -> int {
            return (*static_cast<F *>(given))(runs(first, count));
        };
    }
};

class flush : public owned<pelton_flush> {
public:
    using owned::owned;
    // Takes the receiver, unless it fails.
    static result<flush> open(receiver &&from, const sink &sink, const options &options = {}) noexcept {
        pelton_flush *opened = nullptr;
        int code = pelton_flush_open(from.get(), &options, &sink, &opened);
        if (code == PELTON_OK) from.detach();
        return {code, flush(opened)};
    }
    answer run(std::int64_t deadline_ns = forever) noexcept { return pelton_flush_run(handle_, deadline_ns); }
    using owned::flush_now, owned::sync;
};

// ---- Appending ------------------------------------------------------------------------------------------------------------

class appender : public owned<pelton_appender> {
public:
    using owned::owned;
    answer append(bytes payload) noexcept { return pelton_append(handle_, payload.data(), payload.size()); }
    result<reservation> reserve(std::size_t size) noexcept { return reserved<reservation>(size, no_wait); }
};

// Makes appenders for threads; used by any number of them at once, but for closing.
class appenders : public owned<pelton_appenders> {
public:
    using owned::owned;
    static result<appenders> open(const sink &sink, const options &options = {}) noexcept {
        pelton_appenders *opened = nullptr;
        int code = pelton_appenders_open(&options, &sink, &opened);
        return {code, appenders(opened)};
    }
    result<pelton::appender> appender() const noexcept {
        pelton_appender *opened = nullptr;
        int code = pelton_appender_open(handle_, &opened);
        return {code, pelton::appender(opened)};
    }
    // By the calling thread's own appender.
    answer append(bytes payload) const noexcept { return pelton_appenders_append(handle_, payload.data(), payload.size()); }
    using owned::flush_now, owned::sync;
};

// Reads a record file: `while (auto record = records->next()) use(record->data, record->size);`.
class records : public owned<pelton_records> {
public:
    using owned::owned;
    static result<records> open(const char *path) noexcept {
        pelton_records *opened = nullptr;
        int code = pelton_records_open(path, &opened);
        return {code, records(opened)};
    }
    // Its data stays good until the next call.
    result<pelton_record> next() noexcept {
        pelton_record found{};
        int code = pelton_records_next(handle_, &found);
        return {code, std::move(found)};
    }
};

// ---- Calls ----------------------------------------------------------------------------------------------------------------
//
//     auto client = pelton::client::open("echo");                    auto service = pelton::service::listen("echo");
//     if (auto answer = client->call("hello"))                       while (auto request = service->receive())
//         use(answer->data(), answer->size());                           if (!request->responder.reply(request->payload())) ...

inline constexpr std::uint64_t any_call = PELTON_ANY_CALL;

// An answer in place, released when destroyed.
class completion : lent<pelton_client, pelton_release> {
public:
    completion() noexcept = default;
    std::uint64_t call() const noexcept { return completion_.call; }
    // PELTON_REPLY and the like.
    std::uint32_t outcome() const noexcept { return completion_.outcome; }
    std::uint32_t code() const noexcept { return completion_.code; }
    bytes payload() const noexcept { return {completion_.data, completion_.size}; }
    const void *data() const noexcept { return completion_.data; }
    std::size_t size() const noexcept { return completion_.size; }
    answer release() noexcept { return back(); }

private:
    friend class client;
    completion(pelton_client *client, const pelton_completion &found) noexcept : lent(client), completion_(found) {}
    pelton_completion completion_{};
};

// Room for a request.
class request_reservation : public room<pelton_client> {
public:
    request_reservation() noexcept = default;
    // Asks with the first size bytes: the call. Flags are 0 or PELTON_IDEMPOTENT.
    result<std::uint64_t> submit(std::size_t size, std::uint32_t flags = 0) noexcept {
        std::uint64_t call = 0;
        int code = used(pelton_submit(handle_, data_, size, flags, no_wait, &call));
        return {code, std::move(call)};
    }
    result<std::uint64_t> submit() noexcept { return submit(size_); }

private:
    template <typename> friend class owned;
    using room::room;
};

class client : public owned<pelton_client> {
public:
    using owned::owned;
    static result<client> open(const char *name, const options &options = {}) noexcept {
        pelton_client *opened = nullptr;
        int code = pelton_client_open(name, &options, &opened);
        return {code, client(opened)};
    }
    result<completion> call(bytes request, std::int64_t deadline_ns = forever) noexcept {
        pelton_completion found;
        int code = pelton_call(handle_, request.data(), request.size(), deadline_ns, &found);
        if (code != PELTON_OK) return code;
        return {code, completion(handle_, found)};
    }
    // Flags are 0 or PELTON_IDEMPOTENT.
    result<std::uint64_t> submit(bytes request, std::int64_t deadline_ns = forever, std::uint32_t flags = 0) noexcept {
        std::uint64_t call = 0;
        int code = pelton_submit(handle_, request.data(), request.size(), flags, deadline_ns, &call);
        return {code, std::move(call)};
    }
    // PELTON_NOTIFY.
    answer notify(bytes message, std::int64_t deadline_ns = forever) noexcept {
        return pelton_submit(handle_, message.data(), message.size(), PELTON_NOTIFY, deadline_ns, nullptr);
    }
    result<request_reservation> reserve(std::size_t size, std::int64_t deadline_ns = forever) noexcept {
        return reserved<request_reservation>(size, deadline_ns);
    }
    answer cancel(std::uint64_t call) noexcept { return pelton_cancel(handle_, call); }
    result<completion> await(std::uint64_t call = any_call, std::int64_t deadline_ns = forever) noexcept {
        pelton_completion found;
        int code = pelton_await(handle_, call, deadline_ns, &found);
        if (code != PELTON_OK) return code;
        return {code, completion(handle_, found)};
    }
    using owned::arm, owned::disarm, owned::fd, owned::info;
};

class reply_reservation;

// Answers one request, on any thread; destroyed without an answer, it lets go of the call. Empty after the last answer.
class responder : public owned<pelton_responder> {
public:
    using owned::owned;
    answer reply(bytes reply) noexcept { return last(pelton_reply(handle_, reply.data(), reply.size())); }
    answer fail(std::uint32_t code, bytes why) noexcept { return last(pelton_reply_fail(handle_, code, why.data(), why.size())); }
    answer end() noexcept { return last(pelton_reply_end(handle_)); }
    answer part(bytes part, std::int64_t deadline_ns = forever) noexcept {
        return pelton_reply_part(handle_, part.data(), part.size(), deadline_ns);
    }
    // The responder stays where it is as long as what this answers.
    result<reply_reservation> reserve(std::size_t size) noexcept;
    bool is_cancelled() const noexcept { return pelton_responder_is_cancelled(handle_) == 1; }

private:
    int last(int code) noexcept {
        if (code != PELTON_TOO_LARGE && code != PELTON_RESERVED && code != PELTON_NULL && code != PELTON_WRONG_THREAD &&
            code != PELTON_FORKED && code != PELTON_INTERNAL)
            detach();
        return code;
    }
};

// Room for a reply or a part of one.
class reply_reservation : public room<pelton_responder> {
public:
    reply_reservation() noexcept = default;
    // Replies with the first size bytes.
    answer reply(std::size_t size) noexcept {
        int code = used(pelton_reply(handle_, data_, size));
        if (code == PELTON_OK) responder_->detach();
        return code;
    }
    answer reply() noexcept { return reply(size_); }
    answer part(std::size_t size) noexcept { return used(pelton_reply_part(handle_, data_, size, no_wait)); }

private:
    template <typename> friend class owned;
    friend class responder;
    using room::room;
    responder *responder_ = nullptr;
};

inline result<reply_reservation> responder::reserve(std::size_t size) noexcept {
    auto room = reserved<reply_reservation>(size, no_wait);
    room->responder_ = this;
    return room;
}

// A request in place, released when destroyed, and what answers it: to be moved elsewhere, if it is to be answered later.
class request : lent<pelton_service, pelton_release> {
public:
    request() noexcept = default;
    bytes payload() const noexcept { return {request_.data, request_.size}; }
    const void *data() const noexcept { return request_.data; }
    std::size_t size() const noexcept { return request_.size; }
    bool is_notification() const noexcept { return request_.responder == nullptr; }
    std::int64_t deadline_ns() const noexcept { return request_.deadline_ns; }
    std::uint32_t pid() const noexcept { return request_.pid; }
    std::uint32_t uid() const noexcept { return request_.uid; }
    answer release() noexcept { return back(); }
    pelton::responder responder;

private:
    friend class service;
    request(pelton_service *service, const pelton_request &found) noexcept
        : lent(service), responder(found.responder), request_(found) {}
    pelton_request request_{};
};

class service : public owned<pelton_service> {
public:
    using owned::owned;
    static result<service> listen(const char *name, const options &options = {}) noexcept {
        pelton_service *listening = nullptr;
        int code = pelton_service_listen(name, &options, &listening);
        return {code, service(listening)};
    }
    result<request> receive(std::int64_t deadline_ns = forever) noexcept {
        pelton_request found;
        int code = pelton_service_receive(handle_, deadline_ns, &found);
        if (code != PELTON_OK) return code;
        return {code, request(handle_, found)};
    }
    // By a callback that is called with each request, by as many threads at once; what it throws ends the program. The bytes are a copy,
    // good until it returns.
    template <typename F, typename = std::enable_if_t<std::is_invocable_v<F &, request>>>
    answer run(std::uint32_t threads, F &callback) noexcept {
        auto handler = [](void *given, const pelton_request *found) noexcept {
            (*static_cast<F *>(given))(request(nullptr, *found));
        };
        return pelton_service_run(handle_, threads, handler, const_cast<void *>(static_cast<const void *>(std::addressof(callback))));
    }
    // Any thread, at any time before the close.
    answer stop(std::uint32_t how = PELTON_STOP_NOW) const noexcept { return pelton_service_stop(handle_, how); }
    using owned::arm, owned::disarm, owned::fd, owned::info;
};

// ---- Files -----------------------------------------------------------------------------------------------------------------

// pelton_operation of a kind: `pelton::operation read(PELTON_FILE_READ); read.file = file.get();`.
struct operation : pelton_operation {
    explicit operation(pelton_file_operation what) noexcept : pelton_operation{} { kind = what; }
};

class file : public owned<pelton_file> {
public:
    using owned::owned;
    static result<file> from_fd(int fd, const char *name) noexcept {
        pelton_file *opened = nullptr;
        int code = pelton_file_from_fd(fd, name, &opened);
        return {code, file(opened)};
    }
    using owned::fd;
};

// What came of an operation. A file that was opened is closed with it, unless it is taken.
struct file_completion : pelton_file_completion {
    file_completion() noexcept : pelton_file_completion{} {}
    file_completion(file_completion &&other) noexcept : pelton_file_completion(other) { other.file = nullptr; }
    file_completion &operator=(file_completion &&) = delete;
    ~file_completion() { pelton_close(file); }
    pelton::file take_file() noexcept { return pelton::file(std::exchange(file, nullptr)); }
};

class engine : public owned<pelton_engine> {
public:
    using owned::owned;
    static result<engine> open(const options &options = {}) noexcept {
        pelton_engine *opened = nullptr;
        int code = pelton_engine_open(&options, &opened);
        return {code, engine(opened)};
    }
    // Also of what failed there is what came of it.
    result<file_completion> run(const pelton_operation &operation, std::int64_t deadline_ns = forever) noexcept {
        file_completion done;
        int code = pelton_file_run(handle_, &operation, deadline_ns, &done);
        return {code, std::move(done)};
    }
    // How many were taken, whatever is answered.
    result<std::size_t> submit(const pelton_operation *operations, std::size_t count) noexcept {
        std::size_t taken = 0;
        int code = pelton_file_submit(handle_, operations, count, &taken);
        return {code, std::move(taken)};
    }
    // How many were taken.
    result<std::size_t> completions(pelton_file_completion *out, std::size_t count, std::int64_t deadline_ns = forever) noexcept {
        std::size_t taken = 0;
        int code = pelton_file_completions(handle_, deadline_ns, out, count, &taken);
        return {code, std::move(taken)};
    }
    answer cancel(std::uint64_t token) noexcept { return pelton_file_cancel(handle_, token); }
    answer drain(std::int64_t deadline_ns = forever) noexcept { return pelton_drain(handle_, deadline_ns); }
    using owned::arm, owned::disarm, owned::fd, owned::info;
};

} // namespace pelton

#endif
