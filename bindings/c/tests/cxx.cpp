/* pelton.hpp: what it adds to pelton.h: results, unique handles, what destructors release, and ranges. */
#include "check.h"
#include <atomic>
#include <pelton.hpp>
#include <thread>
#include <vector>

using pelton::as_bytes, pelton::as_text, pelton::bytes_of;

template <typename T> static int code_of(const pelton::expected<T> &result) {
    if (result.has_value()) return PELTON_OK;
    return result.error().category() == pelton::category() ? result.error().value() : PELTON_SYSTEM;
}

#define IS(call, wanted) RETURNS(code_of(call), wanted)

static pelton::deadline soon() { return pelton::deadline(SOON); }

static pelton::channel new_ends() {
    pelton::channel_options options;
    options.capacity = 64 << 10;
    auto made = pelton::threads(options);
    IS(made, PELTON_OK);
    return *std::move(made);
}

static uint64_t unreleased(pelton::sender &sender) {
    auto info = sender.info();
    IS(info, PELTON_OK);
    return info->unreleased;
}

static void messages_are_released_at_the_end_of_their_scope() {
    auto [sender, receiver] = new_ends();
    for (const char *text : {"one", "two", "three", "four"}) {
        IS(sender.send(as_bytes(text), pelton::no_wait), PELTON_OK);
    }
    const char *wanted[] = {"one", "two", "three", "four"};
    uint32_t count = 0;
    while (auto message = receiver.receive(pelton::no_wait)) {
        CHECK(as_text(message->bytes()) == wanted[count++]);
        CHECK(message->seq() == count && message->lane() == 0 && !message->is_redelivered() && message->descriptor_count() == 0);
        CHECK(unreleased(sender) == 5 - count);
        IS(receiver.receive(pelton::no_wait), PELTON_NOT_RELEASED);
    }
    CHECK(count == 4 && unreleased(sender) == 0);
    IS(sender.send({}, pelton::no_wait), PELTON_OK);
    auto last = receiver.receive();
    IS(last, PELTON_OK);
    CHECK(last->bytes().empty());
    /* Moved, it is released once, by the one moved to. */
    {
        auto moved = *std::move(last);
        CHECK(unreleased(sender) == 1);
    }
    CHECK(unreleased(sender) == 0);
    IS(receiver.receive(pelton::no_wait), PELTON_AGAIN);
    IS(sender.close(), PELTON_OK);
    IS(receiver.receive(), PELTON_CLOSED);
}

static void what_is_reserved_is_seen_only_if_committed() {
    auto [sender, receiver] = new_ends();
    {
        auto room = sender.reserve(100);
        IS(room, PELTON_OK);
        CHECK(room->size() == 100);
        IS(sender.send(as_bytes("x")), PELTON_RESERVED);
    }
    IS(receiver.receive(pelton::no_wait), PELTON_AGAIN);
    {
        auto room = sender.reserve(8);
        IS(room, PELTON_OK);
        IS(room->commit(9), PELTON_TOO_LARGE);
        memcpy(room->data(), "12345678", 8);
        IS(room->commit(4), PELTON_OK);
        IS(room->commit(4), PELTON_NULL);
    }
    {
        auto room = sender.reserve(8);
        IS(room->abort(), PELTON_OK);
        IS(sender.send(as_bytes("5678")), PELTON_OK);
    }
    char one[] = "one", two[] = "two";
    iovec batch[] = {{one, 3}, {two, 3}};
    IS(sender.send_batch(batch), PELTON_OK);
    CHECK(unreleased(sender) == 4);
    pelton_message array[8];
    std::string_view wanted[] = {"1234", "5678", "one", "two"};
    {
        auto messages = receiver.receive_batch(array);
        IS(messages, PELTON_OK);
        CHECK(messages->size() == 4);
        size_t at = 0;
        for (const pelton_message &message : *messages) {
            CHECK(as_text(bytes_of(message)) == wanted[at++]);
        }
        CHECK(at == 4 && unreleased(sender) == 4);
    }
    CHECK(unreleased(sender) == 0);
    IS(receiver.receive_batch(array, std::chrono::microseconds(1)), PELTON_AGAIN);
}

static void a_message_carries_its_traceparent() {
    const char *text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for (bool is_traced : {true, false}) {
        pelton::channel_options options;
        options.capacity = 64 << 10;
        options.traced = is_traced;
        auto [sender, receiver] = *pelton::threads(options);
        const std::string wanted = is_traced ? text : "";
        for (int i = 0; i < 3; i++) {
            IS(sender.send_traced(as_bytes("one"), text), PELTON_OK);
            IS(sender.send_traced(as_bytes("two"), i == 0 ? nullptr : "no traceparent"), PELTON_OK);
        }
        IS(sender.reserve_traced(5, text, pelton::no_wait)->commit(4), PELTON_OK);
        for (const std::string &each : {wanted, std::string()}) {
            auto message = receiver.receive();
            CHECK(message->traceparent() == each);
        }
        std::byte buffer[8];
        for (const std::string &each : {wanted, std::string()}) {
            CHECK(*receiver.receive_copy(buffer) == 3 && receiver.traceparent() == each);
        }
        pelton_message array[8];
        size_t count = 0;
        while (auto messages = receiver.receive_batch(array, pelton::no_wait)) {
            count += messages->size();
            // The messages with one: the first and the last.
            CHECK(messages->traceparent() == (count == 1 || count == 3 ? wanted : std::string()));
        }
        CHECK(count == 3);
    }
}

static void handles_are_closed_once_by_their_last_owner() {
    auto ends = new_ends();
    pelton::sender first = std::move(ends.sender);
    CHECK(first && !ends.sender);
    IS(ends.sender.send(as_bytes("x")), PELTON_NULL);
    pelton::sender second;
    second = std::move(first);
    IS(second.send(as_bytes("x")), PELTON_OK);
    pelton_sender *raw = second.release();
    CHECK(raw && !second.native_handle());
    {
        pelton::sender third(raw);
        IS(third.send(as_bytes("y")), PELTON_OK);
        IS(third.wait_released(pelton::no_wait), PELTON_AGAIN);
        IS(third.trim(), PELTON_OK);
    }
    RETURNS(pelton_close(raw), PELTON_CLOSED_HANDLE);
    /* Assigning closes what was there. */
    auto others = new_ends(), abandoned = new_ends();
    abandoned.receiver = std::move(ends.receiver);
    IS(abandoned.sender.arm_for_end(), PELTON_CLOSED);
    ends.receiver = std::move(others.receiver);
    IS(others.sender.send(as_bytes("z")), PELTON_OK);
    CHECK(as_text(ends.receiver.receive()->bytes()) == "z");
    IS(ends.receiver.close(), PELTON_OK);
    IS(others.sender.wait_released(std::chrono::seconds(60)), PELTON_OK);
    IS(others.sender.send(as_bytes("z")), PELTON_OK);
    IS(others.sender.wait_released(std::chrono::seconds(60)), PELTON_CLOSED);
}

static void a_held_message_is_read_and_released_on_another_thread() {
    auto [sender, receiver] = new_ends();
    IS(sender.send(as_bytes("held")), PELTON_OK);
    IS(sender.send(as_bytes("next")), PELTON_OK);
    pelton::held_message held;
    {
        auto message = receiver.receive();
        auto kept = message->hold();
        IS(kept, PELTON_OK);
        IS(message->release(), PELTON_NULL);
        held = *std::move(kept);
    }
    CHECK(as_text(receiver.receive()->bytes()) == "next");
    CHECK(unreleased(sender) == 2);
    std::thread([held = std::move(held)]() mutable {
        CHECK(as_text(held.bytes()) == "held" && held.bytes().size() == 4 && held);
        held = {};
    }).join();
    IS(receiver.receive(pelton::no_wait), PELTON_AGAIN);
    CHECK(unreleased(sender) == 0);
}

static void a_buffer_that_is_too_small_leaves_what_was_received() {
    auto [sender, receiver] = new_ends();
    std::byte buffer[8];
    int fds[2], got[2];
    IS(sender.send(as_bytes("longer than eight")), PELTON_OK);
    IS(receiver.receive_copy(buffer), PELTON_TOO_SMALL);
    {
        auto message = receiver.receive();
        CHECK(message->bytes().size() == 17);
        IS(message->release(), PELTON_OK);
    }
    IS(sender.send(as_bytes("short")), PELTON_OK);
    CHECK(*receiver.receive_copy(buffer) == 5 && memcmp(buffer, "short", 5) == 0);
    CHECK(pipe(fds) == 0);
    IS(sender.send_descriptors(as_bytes("both"), fds), PELTON_OK);
    {
        auto message = receiver.receive();
        CHECK(message->descriptor_count() == 2);
        IS(message->take_descriptors({got, 1}), PELTON_TOO_SMALL);
        CHECK(*message->take_descriptors(got) == 2);
    }
    CHECK(write(got[1], "x", 1) == 1 && read(fds[0], buffer, 8) == 1);
    pelton_message one;
    IS(sender.send_descriptors(as_bytes("one"), {fds, 1}), PELTON_OK);
    {
        auto messages = receiver.receive_batch({&one, 1});
        int again;
        CHECK(*messages->take_descriptors({&again, 1}) == 1);
        close(again);
        IS(messages->release(), PELTON_OK);
    }
    for (int fd : {fds[0], fds[1], got[0], got[1]}) {
        close(fd);
    }
}

static void a_child_sends_and_dies(const char *name) {
    pelton::channel_options options;
    options.deadline_ns = SOON;
    auto sender = pelton::sender::open(name, options);
    IS(sender, PELTON_OK);
    IS(sender->send(as_bytes("last words"), soon()), PELTON_OK);
    IS(sender->sync(), PELTON_REFUSED);
    IS(sender->resume(pelton::no_wait), PELTON_REFUSED);
    kill(getpid(), SIGKILL);
}

static void a_child_receives(const char *name) {
    pelton::channel_options options;
    options.deadline_ns = SOON;
    auto receiver = pelton::receiver::open(name, options);
    IS(receiver, PELTON_OK);
    CHECK(as_text(receiver->receive(soon())->bytes()) == "to a receiver");
}

static void endpoints_connect_and_report_deaths() {
    char name[128];
    auto listener = pelton::listener::open(place(name, "unix:%s/socket"));
    IS(listener, PELTON_OK);
    CHECK(listener->fd() >= 0);
    IS(listener->accept_receiver(pelton::no_wait), PELTON_AGAIN);
    pid_t child = start(a_child_sends_and_dies, name);
    auto receiver = listener->accept_receiver(soon());
    IS(receiver, PELTON_OK);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    CHECK(as_text(receiver->receive(soon())->bytes()) == "last words");
    auto end = receiver->receive(soon());
    IS(end, PELTON_PEER_DIED);
    CHECK(end.error() == PELTON_PEER_DIED && end.error() != PELTON_CLOSED);
    CHECK(end.error().message() == pelton_code_text(PELTON_PEER_DIED) && strstr(pelton::error_detail(), "died without closing"));
    CHECK(receiver->info()->generation == 1);
    IS(receiver->sync(), PELTON_REFUSED);
    IS(receiver->resume(std::chrono::milliseconds(1)), PELTON_AGAIN);
    IS(receiver->close(), PELTON_OK);
    child = start(a_child_receives, name);
    auto sender = listener->accept_sender(soon());
    IS(sender, PELTON_OK);
    IS(sender->send(as_bytes("to a receiver")), PELTON_OK);
    finish(child);
    IS(pelton::listener::open(""), PELTON_NAME);
    CHECK(pelton::version() == PELTON_VERSION);
}

static void descriptors_for_loops_are_armed() {
    auto [sender, receiver] = new_ends();
    std::vector<std::byte> large(30000);
    CHECK(sender.fd() >= 0 && receiver.fd() >= 0);
    CHECK(*receiver.arm() == pelton::readiness::armed);
    CHECK(sender.arm(large.size()).value() == pelton::readiness::ready);
    IS(sender.send({large.data(), large.size()}, pelton::no_wait), PELTON_OK);
    IS(sender.send({large.data(), large.size()}, pelton::no_wait), PELTON_OK);
    CHECK(*sender.arm(large.size()) == pelton::readiness::armed);
    CHECK(*receiver.arm() == pelton::readiness::ready);
    IS(receiver.disarm(), PELTON_OK);
    IS(sender.disarm(), PELTON_OK);
    IS(sender.arm_for_end(), PELTON_OK);
}

/* Numbers, 8 bytes each, that have come to a sink in order. */
struct counting {
    uint64_t next = 0;
    int refuses = 0;
    int operator()(pelton::span<const pelton_chunk> chunks) {
        if (refuses < 0) return refuses;
        for (const pelton_chunk &chunk : chunks) {
            uint32_t messages = 0;
            for (const pelton_record &record : pelton::records_of(chunk)) {
                uint64_t number;
                CHECK(record.size == sizeof number && record.seq == chunk.first_seq + messages++);
                memcpy(&number, record.data, sizeof number);
                CHECK(number == next++);
            }
            CHECK(messages == chunk.messages);
        }
        return 0;
    }
};

static void a_flush_takes_the_receiver_and_calls_back() {
    auto [sender, receiver] = new_ends();
    counting counted;
    auto none = pelton::flush::to_record_file(std::move(receiver), "/nowhere/at/all");
    CHECK(!none && none.error() == std::errc::no_such_file_or_directory && receiver);
    auto flush = pelton::flush::to_function(std::move(receiver), counted);
    IS(flush, PELTON_OK);
    CHECK(!receiver);
    for (uint64_t number = 0; number < 10; number++) {
        IS(sender.send(as_bytes(number)), PELTON_OK);
    }
    counted.refuses = -ENOSPC;
    IS(flush->flush_now(), PELTON_SINK);
    CHECK(errno == ENOSPC && unreleased(sender) == 10);
    counted.refuses = 0;
    IS(flush->sync(), PELTON_OK);
    CHECK(counted.next == 10 && unreleased(sender) == 0);
    IS(flush->run(pelton::no_wait), PELTON_AGAIN);
    IS(sender.close(), PELTON_OK);
    IS(flush->run(), PELTON_OK);
    /* A function is a callback too, and so is what is constant. */
    static const auto answers_a_number = [](pelton::span<const pelton_chunk> chunks) { return static_cast<int>(chunks.size()); };
    auto others = new_ends();
    IS(pelton::flush::to_function(std::move(others.receiver), answers_a_number)->flush_now(), PELTON_OK);
}

static void what_is_appended_is_flushed_at_the_end_of_the_last_appender() {
    counting counted;
    pelton::appenders_options options;
    options.flush_interval_ns = PELTON_FOREVER;
    auto opened = pelton::appenders::to_function(counted, options);
    IS(opened, PELTON_OK);
    {
        pelton::appenders appenders = *std::move(opened);
        auto appender = appenders.appender();
        IS(appender, PELTON_OK);
        uint64_t number = 0;
        IS(appender->append(as_bytes(number)), PELTON_OK);
        {
            auto room = appender->reserve(100);
            IS(appender->append(as_bytes("x")), PELTON_RESERVED);
            IS(room->abort(), PELTON_OK);
        }
        {
            auto room = appender->reserve(100);
            IS(room, PELTON_OK);
            number = 1;
            memcpy(room->data(), &number, sizeof number);
            IS(room->commit(101), PELTON_TOO_LARGE);
            IS(appenders.flush(), PELTON_OK);
            CHECK(counted.next == 1);
            IS(room->commit(sizeof number), PELTON_OK);
        }
        IS(appenders.sync(), PELTON_OK);
        CHECK(counted.next == 2);
        std::thread([&appenders] {
            for (uint64_t number = 2; number < 1000; number++) {
                IS(appenders.append(as_bytes(number)), PELTON_OK);
            }
        }).join();
        CHECK(counted.next == 2);
    }
    CHECK(counted.next == 1000);
}

static void a_record_file_is_read_back() {
    char path[128];
    pelton::record_file_options file;
    place(path, "%s/log");
    file.sync_bytes = PELTON_EACH_WRITE;
    {
        auto appenders = pelton::appenders::to_record_file(path, file);
        IS(appenders, PELTON_OK);
        IS(appenders->append(as_bytes("one")), PELTON_OK);
        IS(appenders->append(as_bytes("two")), PELTON_OK);
    }
    auto records = pelton::records::open(path);
    IS(records, PELTON_OK);
    std::string_view wanted[] = {"one", "two"};
    size_t at = 0;
    while (auto record = records->next()) {
        CHECK(at < 2 && as_text(bytes_of(*record)) == wanted[at]);
        CHECK(record->seq == ++at);
    }
    CHECK(at == 2);
    IS(records->next(), PELTON_AGAIN);
    IS(pelton::records::open("/dev/null"), PELTON_NOT_A_RECORD_FILE);
    CHECK(unlink(path) == 0);
}

/* A service and a client of this process. */
struct both_sides {
    pelton::service service;
    pelton::client client;
};

static both_sides new_link() {
    char name[128];
    pelton::client_options options;
    options.deadline_ns = SOON;
    auto service = pelton::service::open(place(name, "unix:%s/service"));
    IS(service, PELTON_OK);
    pelton::client client;
    std::atomic<bool> is_open = false;
    std::thread opening([&] {
        auto opened = pelton::client::open(name, options);
        IS(opened, PELTON_OK);
        client = *std::move(opened);
        is_open = true;
    });
    while (!is_open) IS(service->receive(std::chrono::milliseconds(1)), PELTON_AGAIN);
    opening.join();
    return {*std::move(service), std::move(client)};
}

static void calls_are_answered_and_given_back_at_the_end_of_their_scope() {
    auto [service, client] = new_link();
    auto one = client.submit(as_bytes("one"));
    IS(one, PELTON_OK);
    {
        auto request = service.receive();
        IS(request, PELTON_OK);
        CHECK(as_text(request->bytes()) == "one" && !request->is_notification() && request->deadline().ns() == PELTON_FOREVER);
        CHECK(request->pid() == static_cast<uint32_t>(getpid()) && request->uid() == getuid());
        CHECK(!request->responder().is_cancelled());
        IS(service.receive(pelton::no_wait), PELTON_NOT_RELEASED);
        IS(request->responder().part(as_bytes("a part")), PELTON_OK);
        IS(request->responder().reply(request->bytes()), PELTON_OK);
        CHECK(!request->responder());
        IS(request->responder().reply(as_bytes("again")), PELTON_NULL);
    }
    {
        auto answer = client.await_call(*one);
        IS(answer, PELTON_OK);
        CHECK(answer->outcome() == PELTON_PART && as_text(answer->bytes()) == "a part" && answer->call() == *one);
        IS(client.await(pelton::no_wait), PELTON_NOT_RELEASED);
    }
    CHECK(as_text(client.await()->bytes()) == "one");
    /* What is not answered is let go of, at the end of its scope. */
    IS(client.submit(as_bytes("two")), PELTON_OK);
    IS(service.receive(), PELTON_OK);
    auto abandoned = client.await();
    IS(abandoned, PELTON_OK);
    CHECK(abandoned->outcome() == PELTON_ABANDONED && abandoned->bytes().empty());
    IS(abandoned->release(), PELTON_OK);
    auto info = client.info();
    IS(info, PELTON_OK);
    CHECK(info->in_flight == 0 && info->has_peer);
    IS(client.notify(as_bytes("notification")), PELTON_OK);
    auto notification = service.receive();
    CHECK(notification && notification->is_notification() && as_text(notification->bytes()) == "notification");
    IS(notification->release(), PELTON_OK);
    IS(service.info(), PELTON_OK);
}

static void responders_answer_on_other_threads_and_in_place() {
    auto [service, client] = new_link();
    {
        auto room = client.reserve(100);
        IS(room, PELTON_OK);
        CHECK(room->size() == 100);
        IS(client.submit(as_bytes("x"), pelton::no_wait), PELTON_RESERVED);
    }
    auto room = client.reserve(100);
    memcpy(room->data(), "question", 8);
    IS(room->submit(101), PELTON_TOO_LARGE);
    auto call = room->submit(8, PELTON_IDEMPOTENT);
    IS(call, PELTON_OK);
    IS(room->submit(8), PELTON_NULL);
    pelton::responder kept;
    {
        auto request = service.receive();
        CHECK(as_text(request->bytes()) == "question");
        kept = std::move(request->responder());
    }
    std::thread([kept = std::move(kept)]() mutable {
        { IS(kept.reserve(10), PELTON_OK); }
        auto part = kept.reserve(10);
        memcpy(part->data(), "p", 1);
        IS(part->part(1), PELTON_OK);
        auto room = kept.reserve(10);
        memcpy(room->data(), "answer", 6);
        IS(kept.fail(1, as_bytes("")), PELTON_RESERVED);
        IS(room->reply(11), PELTON_TOO_LARGE);
        IS(room->reply(6), PELTON_OK);
        CHECK(!kept);
    }).join();
    IS(client.await_call(*call), PELTON_OK);
    auto answer = client.await_call(*call);
    CHECK(answer->outcome() == PELTON_REPLY && as_text(answer->bytes()) == "answer");
    IS(answer->release(), PELTON_OK);
    auto failed = client.submit(as_bytes("fail")), ended = client.submit(as_bytes("end")), cancelled = client.submit(as_bytes("cancel"));
    IS(service.receive()->responder().fail(7, as_bytes("why")), PELTON_OK);
    IS(service.receive()->responder().end(), PELTON_OK);
    IS(client.cancel(*cancelled), PELTON_OK);
    IS(client.cancel(*cancelled), PELTON_AGAIN);
    {
        auto answer = client.await_call(*failed);
        CHECK(answer->outcome() == PELTON_FAILED && answer->code() == 7 && as_text(answer->bytes()) == "why");
    }
    CHECK(client.await_call(*ended)->outcome() == PELTON_END);
}

static void a_pool_calls_back_until_it_is_stopped() {
    auto [service, client] = new_link();
    auto handler = [&service = service](pelton::request request) {
        if (request.is_notification()) {
            IS(service.stop(), PELTON_OK);
        } else {
            IS(request.responder().reply(request.bytes()), PELTON_OK);
        }
    };
    std::thread asking([&client = client] {
        for (int i = 0; i < 100; i++) {
            auto answer = client.call(as_bytes("ask"), soon());
            IS(answer, PELTON_OK);
            CHECK(as_text(answer->bytes()) == "ask");
        }
        IS(client.notify(as_bytes("")), PELTON_OK);
    });
    IS(service.run(3, handler), PELTON_OK);
    asking.join();
    IS(service.receive(), PELTON_CLOSED);
    CHECK(client.fd() >= 0 && service.fd() >= 0);
    CHECK(*client.arm() == pelton::readiness::armed);
    IS(client.disarm(), PELTON_OK);
    IS(service.arm(), PELTON_CLOSED);
    IS(service.disarm(), PELTON_OK);
    IS(service.drain(), PELTON_OK);
    IS(service.close(), PELTON_OK);
    IS(client.call(as_bytes("ask")), PELTON_CLOSED);
}

static void files_are_opened_written_and_closed_with_their_last_owner() {
    char path[128];
    auto engine = pelton::engine::open();
    IS(engine, PELTON_OK);
    auto open = pelton::operation(PELTON_FILE_OPEN);
    open.path = place(path, "%s/file");
    open.open_flags = O_RDWR | O_CREAT;
    open.mode = 0600;
    int fd = -1;
    {
        auto opened = engine->open_file(open);
        IS(opened, PELTON_OK);
        fd = opened->fd();
        CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    }
    CHECK(fcntl(fd, F_GETFD) == -1);
    auto file = *engine->open_file(open);
    CHECK(file && file.fd() >= 0);
    char bytes[] = "text";
    iovec memory{bytes, 4};
    pelton_operation both[] = {pelton::operation(PELTON_FILE_WRITE), pelton::operation(PELTON_FILE_SYNC)};
    both[0].file = both[1].file = file.native_handle();
    both[0].flags = PELTON_LINKED;
    both[0].memory = &memory;
    both[0].memory_count = 1;
    pelton_file_completion done[2];
    std::size_t accepted = 0;
    IS(engine->submit(both, accepted), PELTON_OK);
    CHECK(accepted == 2 && engine->info()->in_flight == 2 && engine->fd() >= 0);
    IS(engine->wait_idle(soon()), PELTON_OK);
    auto taken = engine->completions(done, soon());
    IS(taken, PELTON_OK);
    CHECK(taken->size() == 2 && done[0].count == 4 && done[1].code == PELTON_OK);
    CHECK(*engine->arm() == pelton::readiness::armed);
    IS(engine->disarm(), PELTON_OK);
    IS(engine->cancel(1), PELTON_AGAIN);
    auto null = pelton::file::from_fd(::open("/dev/null", O_RDWR | O_CLOEXEC), "null");
    IS(null, PELTON_OK);
    both[0].file = null->native_handle();
    both[0].kind = PELTON_FILE_READ;
    both[0].flags = 0;
    both[0].offset = PELTON_CURRENT;
    CHECK(engine->run(both[0])->count == 0);
    open.path = "/nowhere/at/all";
    auto failed = engine->open_file(open);
    CHECK(!failed && failed.error() == std::errc::no_such_file_or_directory);
    IS(file.close(), PELTON_OK);
    IS(engine->close(), PELTON_OK);
    CHECK(unlink(path) == 0);
}

static void a_range_receives_until_the_end_and_says_why() {
    auto [sender, receiver] = new_ends();
    for (std::uint64_t number = 0; number < 5; number++) IS(sender.send(as_bytes(number)), PELTON_OK);
    std::uint64_t next = 0;
    auto messages = receiver.messages(pelton::no_wait);
    for (pelton::message &message : messages) {
        std::uint64_t number;
        CHECK(message.bytes().size() == sizeof number && unreleased(sender) == 5 - next);
        memcpy(&number, message.bytes().data(), sizeof number);
        CHECK(number == next++);
    }
    CHECK(next == 5 && messages.error() == PELTON_AGAIN && unreleased(sender) == 0);
    /* One that is left early releases its message; the next begins where it stopped. */
    IS(sender.send(as_bytes("one")), PELTON_OK);
    IS(sender.send(as_bytes("two")), PELTON_OK);
    for (auto &message : receiver.messages()) {
        CHECK(as_text(message.bytes()) == "one");
        break;
    }
    IS(sender.close(), PELTON_OK);
    auto rest = receiver.messages();
    for (auto &message : rest) CHECK(as_text(message.bytes()) == "two");
    CHECK(rest.error() == PELTON_CLOSED);
}

static void results_have_the_members_of_std_expected() {
    auto channel = pelton::threads();
    CHECK(channel.has_value() && channel);
    pelton::channel both = std::move(channel).value();
    auto none = both.receiver.receive(pelton::no_wait);
    CHECK(!none.has_value() && none.error() == PELTON_AGAIN && none.error() != PELTON_CLOSED);
    CHECK(both.receiver.receive_copy({}, pelton::no_wait).value_or(7) == 7);
    auto sent = both.sender.send(as_bytes("x"));
    CHECK(sent.has_value());
#ifdef __cpp_exceptions
    sent.value();
    bool is_thrown = false;
    try {
        none.value();
#ifdef __cpp_lib_expected
    } catch (const std::bad_expected_access<std::error_code> &thrown) {
#else
    } catch (const pelton::bad_expected_access &thrown) {
#endif
        is_thrown = thrown.error() == PELTON_AGAIN;
    }
    CHECK(is_thrown);
#endif
}

static void deadlines_are_durations_or_times() {
    using namespace std::chrono_literals;
    const auto now = std::chrono::steady_clock::now();
    auto [sender, receiver] = new_ends();
    IS(receiver.receive(20ms), PELTON_AGAIN);
    CHECK(std::chrono::steady_clock::now() - now >= 20ms);
    IS(receiver.receive(now + 40ms), PELTON_AGAIN);
    CHECK(std::chrono::steady_clock::now() - now >= 40ms);
    IS(receiver.receive(-1s), PELTON_AGAIN);
    CHECK(pelton::deadline(std::chrono::hours::max()).ns() == PELTON_FOREVER && pelton::no_wait.ns() == PELTON_NO_WAIT);
}

static void events_and_messages_of_many_senders() {
    pelton::gather_options options;
    options.membership_events = 1;
    auto receiver = pelton::receiver::gather(nullptr, options);
    IS(receiver, PELTON_OK);
    auto senders = receiver->senders();
    IS(senders, PELTON_OK);
    {
        auto sender = senders->sender();
        IS(sender, PELTON_OK);
        IS(sender->send(as_bytes("x")), PELTON_OK);
    }
    pelton_event_kind kinds[] = {PELTON_JOINED, PELTON_MESSAGE, PELTON_LEFT};
    for (auto kind : kinds) {
        auto event = receiver->receive_event(soon());
        IS(event, PELTON_OK);
        CHECK(event->kind == kind && event->lane == 1 && event->message.has_value() == (kind == PELTON_MESSAGE));
        if (event->message) CHECK(as_text(event->message->bytes()) == "x");
    }
    IS(senders->send(as_bytes("by this thread's lane")), PELTON_OK);
    CHECK(as_text(receiver->receive(soon())->bytes()) == "by this thread's lane");
}

static void openings_are_polled() {
    using namespace std::chrono_literals;
    char name[128];
    auto receiver = pelton::receiver::gather(place(name, "unix:%s/socket"));
    IS(receiver, PELTON_OK);
    pelton::channel_options options;
    options.deadline_ns = SOON;
    auto opening = pelton::sender::open_start(name, options);
    IS(opening, PELTON_OK);
    auto sender = opening->finish();
    while (!sender && sender.error() == PELTON_AGAIN) {
        IS(receiver->receive(pelton::no_wait), PELTON_AGAIN);
        pollfd readable{opening->fd(), POLLIN, 0};
        CHECK(poll(&readable, 1, 1) >= 0);
        sender = opening->finish();
    }
    IS(sender, PELTON_OK);
    IS(opening->close(), PELTON_OK);
    IS(sender->send(as_bytes("x")), PELTON_OK);
    IS(sender->poll(1), PELTON_OK);
    IS(receiver->poll(), PELTON_OK);
    CHECK(as_text(receiver->receive()->bytes()) == "x");
    IS(receiver->poll(), PELTON_AGAIN);
    /* The other two kinds fail by themselves. */
    auto of_receiver = pelton::receiver::open_start(name);
    IS(of_receiver, PELTON_OK);
    while (of_receiver->finish().error() == PELTON_AGAIN) IS(receiver->receive(1ms), PELTON_AGAIN);
    auto of_client = pelton::client::open_start("unix:/nowhere/at/all");
    IS(of_client, PELTON_OK);
    pollfd failed{of_client->fd(), POLLIN, 0};
    CHECK(poll(&failed, 1, 60000) == 1);
    IS(of_client->finish(), PELTON_NO_LISTENER);
}

static void a_durable_subscription_continues_with_its_next_process() {
    char directory[128];
    place(directory, "path:%s/durable");
    pelton::subscriber_options durable;
    durable.durable = "audit";
    durable.deadline_ns = soon().ns();
    auto publisher = pelton::publisher::open(directory);
    IS(publisher, PELTON_OK);
    fflush(nullptr);
    pid_t audit = fork();
    CHECK(audit >= 0);
    if (audit == 0) {
        alarm(200);
        auto subscriber = pelton::subscriber::open(directory, durable);
        IS(subscriber, PELTON_OK);
        IS(subscriber->receive(soon()), PELTON_OK);
        auto held = subscriber->receive(soon());
        for (;;) pause();
    }
    IS(publisher->wait_subscribers(1, soon()), PELTON_OK);
    for (const char *text : {"one", "two"}) IS(publisher->send(as_bytes(text)), PELTON_OK);
    pelton_subscriber_state state[1];
    do IS(publisher->subscribers(state), PELTON_OK);
    while (state[0].behind != 1);
    IS(pelton::remove_subscription(directory, "audit"), PELTON_ROLE_TAKEN);
    kill_now(audit);
    {
        auto subscriber = pelton::subscriber::open(directory, durable);
        IS(subscriber, PELTON_OK);
        CHECK(subscriber->info()->continues == 1);
        auto delivery = subscriber->receive(soon());
        IS(delivery, PELTON_OK);
        CHECK(as_text(delivery->bytes()) == "two" && delivery->number() == 2);
    }
    IS(pelton::remove_subscription(directory, "audit"), PELTON_OK);
    IS(publisher->close(), PELTON_OK);
    CHECK(nftw(directory + strlen("path:"), remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0);
}

static void a_delivery_is_released_at_the_end_of_its_scope() {
    auto publisher = pelton::publisher::open(nullptr);
    IS(publisher, PELTON_OK);
    pelton::subscriber_options lagging;
    lagging.policy = PELTON_LAG;
    auto gate = publisher->subscriber(), lag = publisher->subscriber(lagging);
    IS(gate, PELTON_OK);
    IS(lag, PELTON_OK);
    IS(publisher->wait_subscribers(2, pelton::no_wait), PELTON_OK);
    IS(gate->receive(pelton::no_wait), PELTON_AGAIN);
    auto armed = gate->arm();
    CHECK(armed && *armed == pelton::readiness::armed);
    for (const char *text : {"one", "two"}) IS(publisher->send(as_bytes(text)), PELTON_OK);
    armed = gate->arm();
    CHECK(armed && *armed == pelton::readiness::ready);
    for (auto *subscriber : {&*gate, &*lag}) {
        std::uint64_t number = 0;
        for (const char *text : {"one", "two"}) {
            auto delivery = subscriber->receive(soon());
            IS(delivery, PELTON_OK);
            CHECK(as_text(delivery->bytes()) == text && delivery->number() == ++number && delivery->missed() == 0);
            IS(subscriber->poll(), PELTON_NOT_RELEASED);
        }
        CHECK(subscriber->info()->messages == 2 && subscriber->fd() >= 0);
        IS(subscriber->disarm(), PELTON_OK);
    }
    IS(publisher->wait_released(soon()), PELTON_OK);
    IS(publisher->poll(10), PELTON_OK);
    armed = publisher->arm(10);
    CHECK(armed && *armed == pelton::readiness::ready && publisher->fd() >= 0);
    IS(publisher->disarm(), PELTON_OK);
    pelton_subscriber_state states[2];
    auto count = publisher->subscribers(states);
    CHECK(count && *count == 2 && states[0].behind == 0 && publisher->info()->next_number == 3);
    IS(publisher->close(), PELTON_OK);
    IS(lag->receive(), PELTON_CLOSED);
    IS(gate->resume(pelton::no_wait), PELTON_REFUSED);
    auto opening = pelton::subscriber::open_start("unix:/nowhere/at/all");
    IS(opening, PELTON_OK);
    pollfd failed{opening->fd(), POLLIN, 0};
    CHECK(poll(&failed, 1, 60000) == 1);
    IS(opening->finish(), PELTON_NO_LISTENER);
    IS(pelton::subscriber::open("unix:/nowhere/at/all"), PELTON_NO_LISTENER);
}

static void a_set_receives_from_many_publishers_until_each_has_left() {
    auto bids = pelton::publisher::open(nullptr), offers = pelton::publisher::open(nullptr);
    IS(bids, PELTON_OK);
    IS(offers, PELTON_OK);
    auto bid = bids->subscriber(), offer = offers->subscriber();
    IS(bid, PELTON_OK);
    IS(offer, PELTON_OK);
    {
        auto set = pelton::subscriber_set::open(PELTON_SPIN);
        IS(set, PELTON_OK);
        IS(set->add(*bid), PELTON_OK);
        IS(set->add(*offer), PELTON_OK);
        IS(set->add(*offer), PELTON_WRONG_THREAD);
        IS(bid->receive(pelton::no_wait), PELTON_WRONG_THREAD);
        IS(set->receive(pelton::no_wait), PELTON_AGAIN);
        auto armed = set->arm();
        CHECK(armed && *armed == pelton::readiness::armed);
        IS(offers->send(as_bytes("18")), PELTON_OK);
        pollfd arrived{set->fd(), POLLIN, 0};
        CHECK(poll(&arrived, 1, 60000) == 1);
        IS(set->disarm(), PELTON_OK);
        {
            auto event = set->receive(soon());
            IS(event, PELTON_OK);
            CHECK(event->from == offer->native_handle() && as_text(event->delivery->bytes()) == "18" && !event->left);
            IS(set->receive(soon()), PELTON_NOT_RELEASED);
        }
        IS(offers->wait_released(soon()), PELTON_OK);
        CHECK(set->info(*offer)->messages == 1 && set->info(*bid)->messages == 0);
        IS(bids->close(), PELTON_OK);
        auto event = set->receive(soon());
        IS(event, PELTON_OK);
        CHECK(event->from == bid->native_handle() && !event->delivery && event->left == PELTON_CLOSED);
        IS(set->remove(*bid), PELTON_REFUSED);
        IS(set->remove(*offer), PELTON_OK);
        IS(set->receive(), PELTON_AGAIN);
        IS(set->add(*offer), PELTON_OK);
        IS(offers->send(as_bytes("19")), PELTON_OK);
    }
    /* The set has given it back. */
    auto delivery = offer->receive(soon());
    IS(delivery, PELTON_OK);
    CHECK(as_text(delivery->bytes()) == "19" && delivery->number() == 2);
}

/* What the compiler refuses. */
template <typename T> constexpr bool is_unique = std::is_nothrow_move_constructible_v<T> && !std::is_copy_constructible_v<T>;
template <typename T> constexpr bool stays = is_unique<T> && !std::is_move_assignable_v<T>;

int main() {
    static_assert(is_unique<pelton::sender> && is_unique<pelton::client> && is_unique<pelton::responder> && is_unique<pelton::held_message>);
    static_assert(std::is_nothrow_move_assignable_v<pelton::sender> && std::is_nothrow_move_assignable_v<pelton::held_message>);
    static_assert(is_unique<pelton::publisher> && is_unique<pelton::subscriber> && stays<pelton::delivery> && is_unique<pelton::subscriber_set>);
    static_assert(stays<pelton::message> && stays<pelton::message_batch> && stays<pelton::completion> && stays<pelton::request>);
    static_assert(stays<pelton::sender::reservation> && stays<pelton::request_reservation> && stays<pelton::reply_reservation>);
    static const test tests[] = {
        TEST(messages_are_released_at_the_end_of_their_scope),
        TEST(what_is_reserved_is_seen_only_if_committed),
        TEST(a_message_carries_its_traceparent),
        TEST(handles_are_closed_once_by_their_last_owner),
        TEST(a_held_message_is_read_and_released_on_another_thread),
        TEST(a_buffer_that_is_too_small_leaves_what_was_received),
        TEST(endpoints_connect_and_report_deaths),
        TEST(descriptors_for_loops_are_armed),
        TEST(a_range_receives_until_the_end_and_says_why),
        TEST(results_have_the_members_of_std_expected),
        TEST(deadlines_are_durations_or_times),
        TEST(events_and_messages_of_many_senders),
        TEST(openings_are_polled),
        TEST(a_durable_subscription_continues_with_its_next_process),
        TEST(a_delivery_is_released_at_the_end_of_its_scope),
        TEST(a_set_receives_from_many_publishers_until_each_has_left),
        TEST(a_flush_takes_the_receiver_and_calls_back),
        TEST(what_is_appended_is_flushed_at_the_end_of_the_last_appender),
        TEST(a_record_file_is_read_back),
        TEST(calls_are_answered_and_given_back_at_the_end_of_their_scope),
        TEST(responders_answer_on_other_threads_and_in_place),
        TEST(a_pool_calls_back_until_it_is_stopped),
        TEST(files_are_opened_written_and_closed_with_their_last_owner),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
