/* pelton.hpp: what it adds to pelton.h: who owns what, what is given back when, and that nothing of it is lost. */
#include "check.h"
#include <atomic>
#include <pelton.hpp>
#include <thread>
#include <vector>

/* The code of an answer; errors are compared by it. */
#define IS(call, wanted) ANSWERS((call).code(), wanted)

static pelton::both_ends new_ends() {
    pelton::options options;
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
        IS(sender.send(text, pelton::no_wait), PELTON_OK);
    }
    const char *wanted[] = {"one", "two", "three", "four"};
    uint32_t count = 0;
    while (auto message = receiver.receive(pelton::no_wait)) {
        CHECK(message->payload().text() == wanted[count++]);
        CHECK(message->seq() == count && message->lane() == 0 && !message->is_redelivered() && message->descriptors() == 0);
        CHECK(unreleased(sender) == 5 - count);
        IS(receiver.receive(pelton::no_wait), PELTON_NOT_RELEASED);
    }
    CHECK(count == 4 && unreleased(sender) == 0);
    IS(sender.send({}, pelton::no_wait), PELTON_OK);
    auto last = receiver.receive();
    IS(last, PELTON_OK);
    CHECK(last->size() == 0);
    /* Moved, it is released once, by the one moved to. */
    {
        auto moved = *std::move(last);
        CHECK(unreleased(sender) == 1);
    }
    CHECK(unreleased(sender) == 0);
    CHECK(receiver.receive(pelton::no_wait).is_again());
    IS(sender.close(), PELTON_OK);
    IS(receiver.receive(), PELTON_CLOSED);
}

static void what_is_reserved_is_seen_only_if_committed() {
    auto [sender, receiver] = new_ends();
    {
        auto room = sender.reserve(100);
        IS(room, PELTON_OK);
        CHECK(room->size() == 100);
        IS(sender.send("x"), PELTON_RESERVED);
    }
    CHECK(receiver.receive(pelton::no_wait).is_again());
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
        IS(sender.send("5678"), PELTON_OK);
    }
    char one[] = "one", two[] = "two";
    iovec batch[] = {{one, 3}, {two, 3}};
    IS(sender.send_batch(batch, 2), PELTON_OK);
    CHECK(unreleased(sender) == 4);
    pelton_message array[8];
    std::string_view wanted[] = {"1234", "5678", "one", "two"};
    {
        auto messages = receiver.receive_batch(array, 8);
        IS(messages, PELTON_OK);
        CHECK(messages->size() == 4);
        size_t at = 0;
        for (const pelton_message &message : *messages) {
            CHECK(pelton::bytes(message.data, message.size).text() == wanted[at++]);
        }
        CHECK(at == 4 && unreleased(sender) == 4);
    }
    CHECK(unreleased(sender) == 0);
    auto none = receiver.receive_batch(array, 8, pelton::deadline(std::chrono::microseconds(1)));
    CHECK(none.is_again() && none->size() == 0);
}

static void handles_are_closed_once_by_their_last_owner() {
    auto ends = new_ends();
    pelton::sender first = std::move(ends.sender);
    CHECK(first && !ends.sender);
    IS(ends.sender.send("x"), PELTON_NULL);
    pelton::sender second;
    second = std::move(first);
    IS(second.send("x"), PELTON_OK);
    pelton_sender *raw = second.detach();
    CHECK(raw && !second.get());
    {
        pelton::sender third(raw);
        IS(third.send("y"), PELTON_OK);
        IS(third.drain(pelton::no_wait), PELTON_AGAIN);
        IS(third.trim(), PELTON_OK);
    }
    ANSWERS(pelton_close(raw), PELTON_CLOSED_HANDLE);
    /* Assigning closes what was there. */
    auto others = new_ends(), abandoned = new_ends();
    abandoned.receiver = std::move(ends.receiver);
    IS(abandoned.sender.arm(), PELTON_CLOSED);
    ends.receiver = std::move(others.receiver);
    IS(others.sender.send("z"), PELTON_OK);
    CHECK(ends.receiver.receive()->payload().text() == "z");
    IS(ends.receiver.close(), PELTON_OK);
    IS(others.sender.drain(pelton::deadline(std::chrono::seconds(60))), PELTON_OK);
    IS(others.sender.send("z"), PELTON_OK);
    IS(others.sender.drain(pelton::deadline(std::chrono::seconds(60))), PELTON_CLOSED);
}

static void a_held_message_is_read_and_released_on_another_thread() {
    auto [sender, receiver] = new_ends();
    IS(sender.send("held"), PELTON_OK);
    IS(sender.send("next"), PELTON_OK);
    pelton::held held;
    {
        auto message = receiver.receive();
        auto kept = message->hold();
        IS(kept, PELTON_OK);
        IS(message->release(), PELTON_NULL);
        held = *std::move(kept);
    }
    CHECK(receiver.receive()->payload().text() == "next");
    CHECK(unreleased(sender) == 2);
    std::thread([held = std::move(held)]() mutable {
        CHECK(held.payload().text() == "held" && held.size() == 4 && held.data());
        held = {};
    }).join();
    CHECK(receiver.receive(pelton::no_wait).is_again());
    CHECK(unreleased(sender) == 0);
}

static void what_is_too_small_says_what_is_wanted() {
    auto [sender, receiver] = new_ends();
    char buffer[8];
    int fds[2], got[2];
    IS(sender.send("longer than eight"), PELTON_OK);
    auto size = receiver.receive_copy(buffer, sizeof buffer);
    IS(size, PELTON_TOO_SMALL);
    CHECK(*size == 17);
    IS(receiver.receive()->release(), PELTON_OK);
    IS(sender.send("short"), PELTON_OK);
    CHECK(*receiver.receive_copy(buffer, sizeof buffer) == 5 && memcmp(buffer, "short", 5) == 0);
    CHECK(pipe(fds) == 0);
    IS(sender.send_descriptors("both", fds, 2), PELTON_OK);
    {
        auto message = receiver.receive();
        CHECK(message->descriptors() == 2);
        auto count = message->take_descriptors(got, 1);
        IS(count, PELTON_TOO_SMALL);
        CHECK(*count == 2 && *message->take_descriptors(got, 2) == 2);
    }
    CHECK(write(got[1], "x", 1) == 1 && read(fds[0], buffer, 8) == 1);
    pelton_message one;
    IS(sender.send_descriptors("one", fds, 1), PELTON_OK);
    {
        auto messages = receiver.receive_batch(&one, 1);
        int again;
        CHECK(*messages->take_descriptors(&again, 1) == 1);
        close(again);
        IS(messages->release(), PELTON_OK);
    }
    for (int fd : {fds[0], fds[1], got[0], got[1]}) {
        close(fd);
    }
}

static void a_child_sends_and_dies(const char *name) {
    pelton::options options;
    options.deadline_ns = SOON;
    auto sender = pelton::sender::open(name, options);
    IS(sender, PELTON_OK);
    IS(sender->send("last words", SOON), PELTON_OK);
    IS(sender->sync(), PELTON_REFUSED);
    IS(sender->resume(pelton::no_wait), PELTON_REFUSED);
    kill(getpid(), SIGKILL);
}

static void a_child_receives(const char *name) {
    pelton::options options;
    options.deadline_ns = SOON;
    auto receiver = pelton::receiver::open(name, options);
    IS(receiver, PELTON_OK);
    CHECK(receiver->receive(SOON)->payload().text() == "to a receiver");
}

static void ends_connect_and_deaths_are_told() {
    char name[128];
    auto listener = pelton::listener::listen(place(name, "unix:%s/socket"));
    IS(listener, PELTON_OK);
    CHECK(listener->fd() >= 0);
    CHECK(listener->accept_receiver(pelton::no_wait).is_again());
    pid_t child = start(a_child_sends_and_dies, name);
    auto receiver = listener->accept_receiver(SOON);
    IS(receiver, PELTON_OK);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    CHECK(receiver->receive(SOON)->payload().text() == "last words");
    auto end = receiver->receive(SOON);
    IS(end, PELTON_PEER_DIED);
    CHECK(strstr(end.text(), "died") && strstr(pelton::error_detail(), "died without closing"));
    CHECK(receiver->info()->generation == 1);
    IS(receiver->sync(), PELTON_REFUSED);
    IS(receiver->resume(pelton::deadline(std::chrono::milliseconds(1))), PELTON_AGAIN);
    IS(receiver->close(), PELTON_OK);
    child = start(a_child_receives, name);
    auto sender = listener->accept_sender(SOON);
    IS(sender, PELTON_OK);
    IS(sender->send("to a receiver"), PELTON_OK);
    finish(child);
    IS(pelton::listener::listen(""), PELTON_NAME);
    CHECK(pelton::version() == PELTON_VERSION);
}

static void descriptors_for_loops_are_armed() {
    auto [sender, receiver] = new_ends();
    std::vector<char> large(30000);
    CHECK(sender.fd() >= 0 && receiver.fd() >= 0);
    CHECK(receiver.arm().is_again());
    IS(sender.arm_send(large.size()), PELTON_OK);
    IS(sender.send({large.data(), large.size()}, pelton::no_wait), PELTON_OK);
    IS(sender.send({large.data(), large.size()}, pelton::no_wait), PELTON_OK);
    CHECK(sender.arm_send(large.size()).is_again());
    IS(receiver.arm(), PELTON_OK);
    IS(receiver.disarm(), PELTON_OK);
    IS(sender.disarm(), PELTON_OK);
    CHECK(sender.arm().is_again());
}

/* Numbers, 8 bytes each, that have come to a sink in order. */
struct counting {
    uint64_t next = 0;
    int refuses = 0;
    int operator()(pelton::runs runs) {
        if (refuses < 0) return refuses;
        for (const pelton_run &run : runs) {
            uint32_t messages = 0;
            for (const pelton_record &record : pelton::records_of(run)) {
                uint64_t number;
                CHECK(record.size == sizeof number && record.seq == run.first_seq + messages++);
                memcpy(&number, record.data, sizeof number);
                CHECK(number == next++);
            }
            CHECK(messages == run.messages);
        }
        return 0;
    }
};

static void a_flush_takes_the_receiver_and_calls_back() {
    auto [sender, receiver] = new_ends();
    counting counted;
    pelton::sink none("/nowhere/at/all");
    IS(pelton::flush::open(std::move(receiver), none), PELTON_SYSTEM);
    CHECK(receiver);
    auto flush = pelton::flush::open(std::move(receiver), pelton::sink(counted));
    IS(flush, PELTON_OK);
    CHECK(!receiver);
    for (uint64_t number = 0; number < 10; number++) {
        IS(sender.send({&number, sizeof number}), PELTON_OK);
    }
    counted.refuses = -ENOSPC;
    IS(flush->flush_now(), PELTON_SINK);
    CHECK(errno == ENOSPC && unreleased(sender) == 10);
    counted.refuses = 0;
    IS(flush->sync(), PELTON_OK);
    CHECK(counted.next == 10 && unreleased(sender) == 0);
    CHECK(flush->run(pelton::no_wait).is_again());
    IS(sender.close(), PELTON_OK);
    IS(flush->run(), PELTON_OK);
    /* A function is a callback too, and so is what is constant. */
    static const auto answers_a_number = [](pelton::runs runs) { return static_cast<int>(runs.size()); };
    auto others = new_ends();
    IS(pelton::flush::open(std::move(others.receiver), pelton::sink(answers_a_number))->flush_now(), PELTON_OK);
}

static void what_is_appended_is_flushed_at_the_end_of_the_last_appender() {
    counting counted;
    pelton::options options;
    options.flush_interval_ns = PELTON_FOREVER;
    auto opened = pelton::appenders::open(pelton::sink(counted), options);
    IS(opened, PELTON_OK);
    {
        pelton::appenders appenders = *std::move(opened);
        auto appender = appenders.appender();
        IS(appender, PELTON_OK);
        uint64_t number = 0;
        IS(appender->append({&number, sizeof number}), PELTON_OK);
        {
            auto room = appender->reserve(100);
            IS(appender->append("x"), PELTON_RESERVED);
            IS(room->abort(), PELTON_OK);
        }
        {
            auto room = appender->reserve(100);
            IS(room, PELTON_OK);
            number = 1;
            memcpy(room->data(), &number, sizeof number);
            IS(room->commit(101), PELTON_TOO_LARGE);
            IS(appenders.flush_now(), PELTON_OK);
            CHECK(counted.next == 1);
            IS(room->commit(sizeof number), PELTON_OK);
        }
        IS(appenders.sync(), PELTON_OK);
        CHECK(counted.next == 2);
        std::thread([&appenders] {
            for (uint64_t number = 2; number < 1000; number++) {
                IS(appenders.append({&number, sizeof number}), PELTON_OK);
            }
        }).join();
        CHECK(counted.next == 2);
    }
    CHECK(counted.next == 1000);
}

static void a_record_file_is_read_back() {
    char path[128];
    pelton::sink file(place(path, "%s/log"));
    file.sync_bytes = PELTON_EACH_WRITE;
    {
        auto appenders = pelton::appenders::open(file);
        IS(appenders, PELTON_OK);
        IS(appenders->append("one"), PELTON_OK);
        IS(appenders->append("two"), PELTON_OK);
    }
    auto records = pelton::records::open(path);
    IS(records, PELTON_OK);
    std::string_view wanted[] = {"one", "two"};
    size_t at = 0;
    while (auto record = records->next()) {
        CHECK(at < 2 && pelton::bytes(record->data, record->size).text() == wanted[at]);
        CHECK(record->seq == ++at);
    }
    CHECK(at == 2 && records->next().is_again());
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
    pelton::options options;
    options.deadline_ns = SOON;
    auto service = pelton::service::listen(place(name, "unix:%s/service"), options);
    IS(service, PELTON_OK);
    pelton::client client;
    std::atomic<bool> is_open = false;
    std::thread opening([&] {
        auto opened = pelton::client::open(name, options);
        IS(opened, PELTON_OK);
        client = *std::move(opened);
        is_open = true;
    });
    while (!is_open) IS(service->receive(pelton::deadline(std::chrono::milliseconds(1))), PELTON_AGAIN);
    opening.join();
    return {*std::move(service), std::move(client)};
}

static void calls_are_answered_and_given_back_at_the_end_of_their_scope() {
    auto [service, client] = new_link();
    auto one = client.submit("one");
    IS(one, PELTON_OK);
    {
        auto request = service.receive();
        IS(request, PELTON_OK);
        CHECK(request->payload().text() == "one" && !request->is_notification() && request->deadline_ns() == pelton::forever);
        CHECK(request->pid() == static_cast<uint32_t>(getpid()) && request->uid() == getuid());
        CHECK(!request->responder.is_cancelled());
        IS(service.receive(pelton::no_wait), PELTON_NOT_RELEASED);
        IS(request->responder.part("a part"), PELTON_OK);
        IS(request->responder.reply(request->payload()), PELTON_OK);
        CHECK(!request->responder);
        IS(request->responder.reply("again"), PELTON_NULL);
    }
    {
        auto answer = client.await(*one);
        IS(answer, PELTON_OK);
        CHECK(answer->outcome() == PELTON_PART && answer->payload().text() == "a part" && answer->call() == *one);
        IS(client.await(pelton::any_call, pelton::no_wait), PELTON_NOT_RELEASED);
    }
    CHECK(client.await()->payload().text() == "one");
    /* What is not answered is let go of, at the end of its scope. */
    IS(client.submit("two"), PELTON_OK);
    IS(service.receive(), PELTON_OK);
    auto abandoned = client.await();
    IS(abandoned, PELTON_OK);
    CHECK(abandoned->outcome() == PELTON_ABANDONED && abandoned->size() == 0);
    IS(abandoned->release(), PELTON_OK);
    auto info = client.info();
    IS(info, PELTON_OK);
    CHECK(info->calls == 0 && info->has_peer);
    IS(client.notify("told"), PELTON_OK);
    auto told = service.receive();
    CHECK(told && told->is_notification() && told->payload().text() == "told");
    IS(told->release(), PELTON_OK);
    IS(service.info(), PELTON_OK);
}

static void responders_answer_on_other_threads_and_in_place() {
    auto [service, client] = new_link();
    {
        auto room = client.reserve(100);
        IS(room, PELTON_OK);
        CHECK(room->size() == 100);
        IS(client.submit("x", pelton::no_wait), PELTON_RESERVED);
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
        CHECK(request->payload().text() == "question");
        kept = std::move(request->responder);
    }
    std::thread([kept = std::move(kept)]() mutable {
        { IS(kept.reserve(10), PELTON_OK); }
        auto part = kept.reserve(10);
        memcpy(part->data(), "p", 1);
        IS(part->part(1), PELTON_OK);
        auto room = kept.reserve(10);
        memcpy(room->data(), "answer", 6);
        IS(kept.fail(1, ""), PELTON_RESERVED);
        IS(room->reply(11), PELTON_TOO_LARGE);
        IS(room->reply(6), PELTON_OK);
        CHECK(!kept);
    }).join();
    IS(client.await(*call), PELTON_OK);
    auto answer = client.await(*call);
    CHECK(answer->outcome() == PELTON_REPLY && answer->payload().text() == "answer");
    IS(answer->release(), PELTON_OK);
    auto failed = client.submit("fail"), ended = client.submit("end"), cancelled = client.submit("cancel");
    IS(service.receive()->responder.fail(7, "why"), PELTON_OK);
    IS(service.receive()->responder.end(), PELTON_OK);
    IS(client.cancel(*cancelled), PELTON_OK);
    IS(client.cancel(*cancelled), PELTON_AGAIN);
    {
        auto answer = client.await(*failed);
        CHECK(answer->outcome() == PELTON_FAILED && answer->code() == 7 && answer->payload().text() == "why");
    }
    CHECK(client.await(*ended)->outcome() == PELTON_END);
}

static void a_pool_calls_back_until_it_is_stopped() {
    auto [service, client] = new_link();
    auto handler = [&service = service](pelton::request request) {
        if (request.is_notification()) {
            IS(service.stop(), PELTON_OK);
        } else {
            IS(request.responder.reply(request.payload()), PELTON_OK);
        }
    };
    std::thread asking([&client = client] {
        for (int i = 0; i < 100; i++) {
            auto answer = client.call("ask", SOON);
            IS(answer, PELTON_OK);
            CHECK(answer->payload().text() == "ask");
        }
        IS(client.notify(""), PELTON_OK);
    });
    IS(service.run(3, handler), PELTON_OK);
    asking.join();
    IS(service.receive(), PELTON_CLOSED);
    CHECK(client.fd() >= 0 && service.fd() >= 0);
    IS(client.arm(), PELTON_AGAIN);
    IS(client.disarm(), PELTON_OK);
    IS(service.arm(), PELTON_CLOSED);
    IS(service.disarm(), PELTON_OK);
    IS(service.stop(PELTON_STOP_DRAIN), PELTON_OK);
    IS(service.close(), PELTON_OK);
    IS(client.call("ask"), PELTON_CLOSED);
}

static void files_are_opened_written_and_closed_with_their_last_owner() {
    char path[128];
    auto engine = pelton::engine::open();
    IS(engine, PELTON_OK);
    pelton::operation open(PELTON_FILE_OPEN);
    open.path = place(path, "%s/file");
    open.open_flags = O_RDWR | O_CREAT;
    open.mode = 0600;
    int fd = -1;
    {
        auto opened = engine->run(open);
        IS(opened, PELTON_OK);
        fd = pelton_fd(opened->file);
        CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    }
    CHECK(fcntl(fd, F_GETFD) == -1);
    auto file = engine->run(open)->take_file();
    CHECK(file && file.fd() >= 0);
    char bytes[] = "text";
    iovec memory{bytes, 4};
    pelton::operation both[] = {pelton::operation(PELTON_FILE_WRITE), pelton::operation(PELTON_FILE_SYNC)};
    both[0].file = both[1].file = file.get();
    both[0].flags = PELTON_LINKED;
    both[0].memory = &memory;
    both[0].memory_count = 1;
    pelton_file_completion done[2];
    auto submitted = engine->submit(both, 2);
    IS(submitted, PELTON_OK);
    CHECK(*submitted == 2 && engine->info()->calls == 2 && engine->fd() >= 0);
    IS(engine->drain(SOON), PELTON_OK);
    auto taken = engine->completions(done, 2, SOON);
    IS(taken, PELTON_OK);
    CHECK(*taken == 2 && done[0].count == 4 && done[1].code == PELTON_OK);
    IS(engine->arm(), PELTON_AGAIN);
    IS(engine->disarm(), PELTON_OK);
    IS(engine->cancel(1), PELTON_AGAIN);
    auto null = pelton::file::from_fd(::open("/dev/null", O_RDWR | O_CLOEXEC), "null");
    IS(null, PELTON_OK);
    both[0].file = null->get();
    both[0].kind = PELTON_FILE_READ;
    both[0].flags = 0;
    both[0].offset = PELTON_CURRENT;
    CHECK(engine->run(both[0])->count == 0);
    open.path = "/nowhere/at/all";
    auto failed = engine->run(open);
    IS(failed, PELTON_SYSTEM);
    CHECK(failed->error == ENOENT && !failed->file);
    IS(file.close(), PELTON_OK);
    IS(engine->close(), PELTON_OK);
    CHECK(unlink(path) == 0);
}

/* Whether a handle of this class can be armed, and flushed: what pelton.h finds when it is called, C++ finds before. */
template <typename T, typename = void> constexpr bool can_arm = false;
template <typename T> constexpr bool can_arm<T, std::void_t<decltype(std::declval<T &>().arm())>> = true;
template <typename T, typename = void> constexpr bool can_flush = false;
template <typename T> constexpr bool can_flush<T, std::void_t<decltype(std::declval<T &>().flush_now())>> = true;

int main() {
    static_assert(can_arm<pelton::sender> && can_arm<pelton::receiver> && can_arm<pelton::client> && can_arm<pelton::service>);
    static_assert(can_arm<pelton::engine> && !can_arm<pelton::file> && !can_flush<pelton::engine>);
    static_assert(!can_arm<pelton::listener> && !can_arm<pelton::flush> && !can_arm<pelton::responder>);
    static_assert(can_flush<pelton::flush> && can_flush<pelton::appenders> && !can_flush<pelton::sender>);
    static_assert(!std::is_copy_constructible_v<pelton::client> && !std::is_copy_constructible_v<pelton::responder>);
    static_assert(!std::is_move_assignable_v<pelton::completion> && !std::is_move_assignable_v<pelton::request>);
    static_assert(!std::is_copy_constructible_v<pelton::sender> && std::is_nothrow_move_assignable_v<pelton::sender>);
    static_assert(!std::is_copy_constructible_v<pelton::message> && !std::is_move_assignable_v<pelton::message>);
    static_assert(!std::is_move_assignable_v<pelton::reservation> && !std::is_move_assignable_v<pelton::reply_reservation>);
    static const test tests[] = {
        TEST(messages_are_released_at_the_end_of_their_scope),
        TEST(what_is_reserved_is_seen_only_if_committed),
        TEST(handles_are_closed_once_by_their_last_owner),
        TEST(a_held_message_is_read_and_released_on_another_thread),
        TEST(what_is_too_small_says_what_is_wanted),
        TEST(ends_connect_and_deaths_are_told),
        TEST(descriptors_for_loops_are_armed),
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
