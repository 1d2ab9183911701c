// The conformance driver in C++, by pelton.hpp. ../README.md has the command line, the messages and the report.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <pelton.hpp>

#include "../crc32.h"

static std::runtime_error failed(const char *what, std::error_code error) {
    return std::runtime_error(std::string(what) + ": " + error.message() + ": " + pelton::error_detail());
}

// Fails with the operation's name unless a value was returned.
template <typename T> static void check(const char *what, const pelton::expected<T> &result) {
    if (!result) throw failed(what, result.error());
}

// Each wait has this deadline.
static pelton::deadline deadline() {
    const char *seconds = std::getenv("PELTON_SECONDS");
    return std::chrono::seconds(seconds ? std::stol(seconds) : 10);
}

// What a command has to do, and the report about it.
struct run {
    std::string name, then = "close";
    std::size_t count = 0;
    std::vector<std::size_t> sizes;
    std::string letters; // the alphabet, repeated: every message is a slice of it

    std::size_t messages = 0;
    std::uint64_t bytes = 0;
    std::uint32_t checksum = 0;
    std::string end; // of the report of read-records

    bool is_path() const { return name.rfind("path:", 0) == 0; }
    pelton::bytes message(std::size_t i) const {
        return pelton::as_bytes(std::string_view(letters).substr(i % 26, sizes[i % sizes.size()]));
    }
    // The message to be sent next, or to arrive next.
    pelton::bytes next() const { return message(messages); }
    bool has_next() const { return messages < count; }
    // That of the next message with `traced`, or empty.
    std::string traceparent() const {
        if (then != "traced" || messages % 3 == 0) return {};
        char text[80]; // of PELTON_TRACEPARENT_SIZE
        std::snprintf(text, sizeof text, "00-%032zx-%016zx-%02zx", messages + 1, messages + 1, messages % 256);
        return text;
    }
    void add(pelton::bytes found) {
        messages++;
        bytes += found.size();
        checksum += crc32(found.data(), found.size());
    }
    void add_next(pelton::bytes found) {
        const auto expected = has_next() ? pelton::as_text(next()) : "";
        if (!has_next() || pelton::as_text(found) != expected) {
            std::ostringstream text;
            text << "message " << messages << " of " << count << ": found " << found.size() << " bytes `"
                 << pelton::as_text(found).substr(0, 30) << "`, expected " << expected.size() << " bytes `"
                 << expected.substr(0, 30) << "`";
            throw std::runtime_error(text.str());
        }
        add(found);
    }
    void check_count() const {
        if (messages == count) return;
        throw std::runtime_error("found " + std::to_string(messages) + " messages, expected " + std::to_string(count));
    }
};

// An open waits until then for the other side.
template <typename Options> static Options waiting() {
    Options options;
    options.deadline_ns = deadline().ns();
    return options;
}

// By path an open creates the channel, and waits for nobody: messages wait there.
static pelton::channel_options endpoint_options(const run &run) {
    auto options = run.is_path() ? pelton::channel_options() : waiting<pelton::channel_options>();
    options.create = run.is_path();
    options.traced = run.then == "traced";
    return options;
}

static void send(run &run) {
    auto sender = pelton::sender::open(run.name.c_str(), endpoint_options(run));
    check("open", sender);
    for (bool is_released = false; !is_released;) {
        if (run.then == "die" && !run.has_next()) return (void)sender->release(); // it stays open
        auto done = run.has_next() ? sender->send_traced(run.next(), run.traceparent().c_str(), deadline())
                                   : sender->wait_released(deadline());
        if (!done && done.error() == PELTON_PEER_DIED && run.then == "resume") {
            // The successor gets what the receiver that died has not released.
            check("resume", sender->resume(deadline()));
            continue;
        }
        check("send", done);
        if (run.has_next()) run.add(run.next());
        else is_released = true;
    }
    check("close", sender->close());
}

static pelton::expected<pelton::receiver> open_receiver(const run &run) {
    if (run.is_path()) return pelton::receiver::open(run.name.c_str(), endpoint_options(run));
    auto listener = pelton::listener::open(run.name.c_str());
    check("listen", listener);
    return listener->accept_receiver(deadline());
}

static void receive(run &run) {
    auto receiver = open_receiver(run);
    check("open", receiver);
    const bool is_rest = run.then == "rest";
    std::vector<std::uint32_t> checksums; // of the rest
    for (;;) {
        if (run.then == "die" && !run.has_next()) return (void)receiver->release(); // it stays open
        auto message = receiver->receive(deadline()); // in place, released at the end of the scope
        if (!message) {
            if (message.error() == (run.then == "died" ? PELTON_PEER_DIED : PELTON_CLOSED)) break;
            throw failed("receive", message.error());
        }
        if (!is_rest && message->traceparent() != run.traceparent())
            throw std::runtime_error("message " + std::to_string(run.messages) + ": found the traceparent `" +
                                     message->traceparent() + "`, expected `" + run.traceparent() + "`");
        if (is_rest) checksums.push_back(crc32(message->bytes().data(), message->bytes().size()));
        is_rest ? run.add(message->bytes()) : run.add_next(message->bytes());
    }
    if (!is_rest || run.messages == 0 || run.messages > run.count) return run.check_count();
    for (std::size_t i = 0; i < run.messages; i++) {
        const auto expected = run.message(run.count - run.messages + i);
        if (checksums[i] != crc32(expected.data(), expected.size()))
            throw std::runtime_error("message " + std::to_string(i) + " of the rest is another one");
    }
}

static void gather(run &run) {
    auto receiver = pelton::receiver::gather(run.name.c_str());
    check("listen", receiver);
    while (run.has_next()) {
        auto message = receiver->receive(deadline()); // of all senders, round-robin
        check("receive", message);
        std::cout << pelton::as_text(message->bytes()).substr(0, run.sizes[0]) << std::endl;
        run.add(message->bytes());
    }
}

static void call(run &run) {
    auto client = pelton::client::open(run.name.c_str(), waiting<pelton::client_options>());
    check("open", client);
    while (run.has_next()) {
        auto reply = client->call(run.next(), deadline());
        check("call", reply);
        if (reply->outcome() != PELTON_REPLY) throw std::runtime_error("the call has failed");
        run.add_next(reply->bytes());
    }
}

static void stream(run &run) {
    auto client = pelton::client::open(run.name.c_str(), waiting<pelton::client_options>());
    check("open", client);
    auto call = client->submit(run.message(0), deadline());
    check("submit", call);
    for (auto outcome = PELTON_PART; outcome == PELTON_PART;) {
        auto part = client->await_call(*call, deadline());
        check("await", part);
        outcome = part->outcome();
        if (outcome == PELTON_PART || outcome == PELTON_REPLY) run.add_next(part->bytes());
        else if (outcome != PELTON_END) throw std::runtime_error("the call has failed");
    }
    run.check_count();
}

// Draining ends when every client has its replies.
static void drain(pelton::service &service) {
    check("drain", service.drain());
    auto request = service.receive(deadline());
    if (request) throw std::runtime_error("found a request while draining");
    if (request.error() != PELTON_CLOSED) throw failed("drain", request.error());
}

static void serve(run &run) {
    auto service = pelton::service::open(run.name.c_str());
    check("open", service);
    while (run.has_next()) {
        auto request = service->receive(deadline());
        check("receive", request);
        if (request->is_notification()) continue;
        auto replied = request->responder().reply(request->bytes());
        if (!replied) std::cerr << failed("reply", replied.error()).what() << '\n'; // the client has gone
        run.add(request->bytes());
    }
    drain(*service);
}

static void serve_stream(run &run) {
    auto service = pelton::service::open(run.name.c_str());
    check("open", service);
    {
        auto request = service->receive(deadline());
        check("receive", request);
        for (; run.has_next(); run.add(run.next())) {
            // It waits for space; on this thread, since no other client waits for this service.
            check("part", request->responder().part(run.next(), deadline()));
        }
        check("end", request->responder().end());
    }
    drain(*service);
}

static void write_records(run &run) {
    auto appenders = pelton::appenders::to_record_file(run.name.c_str());
    check("create", appenders);
    for (; run.has_next(); run.add(run.next())) check("append", appenders->append(run.next()));
    check("sync", appenders->sync());
    check("close", appenders->close());
}

static void read_records(run &run) {
    auto records = pelton::records::open(run.name.c_str());
    if (!records && records.error() != PELTON_NOT_A_RECORD_FILE) throw failed("open", records.error());
    std::string end = records ? "" : "refused";
    std::size_t damaged = 0;
    while (end.empty()) {
        auto record = records->next();
        if (record) run.add(pelton::bytes_of(*record));
        else if (record.error() == PELTON_DAMAGED) damaged++;
        else if (record.error() == PELTON_AGAIN) end = "end";
        else if (record.error() == PELTON_TORN) end = "torn";
        else if (record.error() == PELTON_NOT_A_RECORD_FILE) end = "later";
        else throw failed("read", record.error());
    }
    run.end = " damaged " + std::to_string(damaged) + ' ' + end;
}

static std::size_t number(const std::string &text) {
    if (text.empty() || text.find_first_not_of("0123456789") != text.npos) throw std::invalid_argument(text);
    return std::stoul(text);
}

// Reads NAME COUNT SIZES [THEN].
static run run_of(std::vector<std::string> arguments, const std::vector<std::string> &thens) {
    run run;
    if (arguments.size() == 4 && std::count(thens.begin(), thens.end(), arguments[3])) {
        run.then = arguments[3];
        arguments.pop_back();
    }
    if (arguments.size() != 3) throw std::invalid_argument("");
    run.name = arguments[0];
    run.count = number(arguments[1]);
    std::istringstream sizes(arguments[2] + ",");
    for (std::string size; std::getline(sizes, size, ',');) run.sizes.push_back(number(size));
    const std::size_t letters = *std::max_element(run.sizes.begin(), run.sizes.end()) + 26;
    for (std::size_t j = 0; j < letters; j++) run.letters += static_cast<char>('a' + j % 26);
    return run;
}

int main(int count, char **argument) {
    struct command {
        void (*carry_out)(run &);
        std::vector<std::string> thens;
    };
    const std::map<std::string, command> commands{{"send", {send, {"close", "die", "resume", "traced"}}},
                                                  {"recv", {receive, {"close", "died", "die", "rest", "traced"}}},
                                                  {"gather", {gather, {}}},
                                                  {"call", {call, {}}},
                                                  {"serve", {serve, {}}},
                                                  {"stream", {stream, {}}},
                                                  {"serve-stream", {serve_stream, {}}},
                                                  {"write-records", {write_records, {}}},
                                                  {"read-records", {read_records, {}}}};
    std::vector<std::string> arguments(argument + 1, argument + count);
    const std::string verb = arguments.empty() ? "" : arguments[0];
    const auto command = commands.find(verb);
    if (command == commands.end()) {
        std::cout << "unsupported " << verb << ": "
                  << (verb == "vectors" ? "libpelton, which it uses, is tested with the vectors"
                                        : "this driver does not have it")
                  << '\n';
        return 3;
    }
    try {
        arguments.erase(arguments.begin());
        if (verb == "read-records") arguments.insert(arguments.end(), {"0", "0"});
        run run = run_of(arguments, command->second.thens);
        command->second.carry_out(run);
        char checksum[9];
        std::snprintf(checksum, sizeof checksum, "%08x", run.checksum);
        std::cout << "ok " << verb << ' ' << run.messages << " messages " << run.bytes << " bytes checksum " << checksum
                  << run.end << std::endl;
        if (run.then == "die") std::raise(SIGKILL);
        return 0;
    } catch (const std::invalid_argument &) {
        std::cerr << "usage: driver " << verb << " NAME COUNT SIZES [THEN], as conformance/README.md has it\n";
        return 2;
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
