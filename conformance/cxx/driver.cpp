// The conformance driver in C++, by pelton.hpp. ../README.md has the command line and the messages.
#include <chrono>
#include <iostream>
#include <stdexcept>
#include <string>

#include <pelton.hpp>

using namespace std::chrono_literals;

// Fails with the operation's name unless a value was returned.
template <typename T> static void check(const char *what, const pelton::expected<T> &result) {
    if (result) return;
    throw std::runtime_error(std::string(what) + ": " + result.error().message() + ": " + pelton::error_detail());
}

// After the last message a receiver or service must return PELTON_CLOSED.
template <typename T> static void check_end(const char *what, const pelton::expected<T> &result) {
    if (result) throw std::runtime_error(std::string(what) + ": one more message");
    if (result.error() != PELTON_CLOSED) throw std::runtime_error(std::string(what) + ": " + result.error().message());
}

// An open waits until then for the other side to listen.
template <typename Options> static Options waiting() {
    Options options;
    options.deadline_ns = pelton::deadline(10s).ns();
    return options;
}

// The messages of one run: slices of the repeated alphabet.
class messages {
public:
    explicit messages(std::size_t size) : size_(size) {
        for (std::size_t j = 0; j < size + 26; j++) letters_ += static_cast<char>('a' + j % 26);
    }
    std::string_view operator[](long i) const { return std::string_view(letters_).substr(i % 26, size_); }
    void check(long i, pelton::bytes bytes) const {
        const std::string_view found = pelton::as_text(bytes), expected = (*this)[i];
        if (found == expected) return;
        throw std::runtime_error("message " + std::to_string(i) + ": found " + std::string(found) + ", expected " +
                                 std::string(expected));
    }

private:
    std::size_t size_;
    std::string letters_;
};

static void send(const char *name, long count, const messages &expected) {
    auto sender = pelton::sender::open(name, waiting<pelton::channel_options>());
    check("open", sender);
    for (long i = 0; i < count; i++) check("send", sender->send(pelton::as_bytes(expected[i]), 10s));
    check("wait_released", sender->wait_released(10s));
    check("close", sender->close());
}

static void receive(const char *name, long count, const messages &expected) {
    auto listener = pelton::listener::open(name);
    check("listen", listener);
    auto receiver = listener->accept_receiver(10s);
    check("accept", receiver);
    for (long i = 0; i < count; i++) {
        auto message = receiver->receive(10s); // in place, released at the end of the scope
        check("receive", message);
        expected.check(i, message->bytes());
    }
    check_end("after the last message", receiver->receive(10s));
}

static void call(const char *name, long count, const messages &expected) {
    auto client = pelton::client::open(name, waiting<pelton::client_options>());
    check("open", client);
    for (long i = 0; i < count; i++) {
        auto reply = client->call(pelton::as_bytes(expected[i]), 10s);
        check("call", reply);
        expected.check(i, reply->bytes());
    }
}

static void serve(const char *name, long count, const messages &) {
    auto service = pelton::service::open(name);
    check("open", service);
    for (long i = 0; i < count; i++) {
        auto request = service->receive(10s);
        check("receive", request);
        check("reply", request->responder().reply(request->bytes()));
    }
    // Draining ends when every client has its replies.
    check("drain", service->drain());
    check_end("while draining", service->receive(10s));
}

int main(int arguments, char **argument) {
    const std::string verb = arguments > 1 ? argument[1] : "";
    const auto run = verb == "send"    ? send
                     : verb == "recv"  ? receive
                     : verb == "call"  ? call
                     : verb == "serve" ? serve
                                       : nullptr;
    if (!run) {
        std::cout << "unsupported " << verb << ": this driver does not have it\n";
        return 3;
    }
    if (arguments != 5) {
        std::cerr << "usage: driver " << verb << " NAME COUNT SIZE\n";
        return 2;
    }
    try {
        const long count = std::stol(argument[3]);
        run(argument[2], count, messages(std::stoul(argument[4])));
        std::cout << "ok " << verb << ' ' << count << (run == send || run == receive ? " messages\n" : " calls\n");
        return 0;
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
