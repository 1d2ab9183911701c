// The conformance driver in C++, by pelton.hpp. ../README.md has the command line and the messages.
#include <chrono>
#include <iostream>
#include <stdexcept>
#include <string>

#include <pelton.hpp>

using namespace std::chrono_literals;

static std::int64_t deadline() { return pelton::deadline(10s); }

static void check(const char *what, pelton::answer answer) {
    if (!answer) throw std::runtime_error(std::string(what) + ": " + answer.text() + ": " + pelton::error_detail());
}

// The messages of one run: slices of the repeated alphabet.
class messages {
public:
    explicit messages(std::size_t size) : size_(size) {
        for (std::size_t j = 0; j < size + 26; j++) letters_ += static_cast<char>('a' + j % 26);
    }
    std::string_view operator[](long i) const { return std::string_view(letters_).substr(i % 26, size_); }
    void check(long i, pelton::bytes found) const {
        if (found.text() == (*this)[i]) return;
        throw std::runtime_error("message " + std::to_string(i) + ": found " + std::string(found.text()) + ", expected " + std::string((*this)[i]));
    }

private:
    std::size_t size_;
    std::string letters_;
};

static void send(const char *name, long count, const messages &expected) {
    pelton::options options;
    options.deadline_ns = deadline(); // until then it waits for a receiver to listen
    auto sender = pelton::sender::open(name, options);
    check("connect", sender);
    for (long i = 0; i < count; i++) check("send", sender->send(expected[i], deadline()));
    check("drain", sender->drain(deadline())); // until the receiver has released every message
    check("close", sender->close());
}

static void receive(const char *name, long count, const messages &expected) {
    auto listener = pelton::listener::listen(name);
    check("listen", listener);
    auto receiver = listener->accept_receiver(deadline());
    check("accept", receiver);
    for (long i = 0; i < count; i++) {
        auto message = receiver->receive(deadline()); // in place, released at the end of the scope
        check("receive", message);
        expected.check(i, message->payload());
    }
    auto end = receiver->receive(deadline());
    if (end.code() != PELTON_CLOSED) throw std::runtime_error(std::string("after the last message: ") + end.text());
}

static void call(const char *name, long count, const messages &expected) {
    pelton::options options;
    options.deadline_ns = deadline();
    auto client = pelton::client::open(name, options);
    check("connect", client);
    for (long i = 0; i < count; i++) {
        auto reply = client->call(expected[i], deadline());
        check("call", reply);
        expected.check(i, reply->payload());
    }
}

static void serve(const char *name, long count, const messages &) {
    auto service = pelton::service::listen(name);
    check("listen", service);
    for (long i = 0; i < count; i++) {
        auto request = service->receive(deadline());
        check("receive", request);
        check("reply", request->responder.reply(request->payload()));
    }
    // Draining ends when every client has its replies.
    check("stop", service->stop(PELTON_STOP_DRAIN));
    auto end = service->receive(deadline());
    if (end.code() != PELTON_CLOSED) throw std::runtime_error(std::string("while draining: ") + end.text());
}

int main(int arguments, char **argument) {
    const std::string verb = arguments > 1 ? argument[1] : "";
    const auto run = verb == "send" ? send : verb == "recv" ? receive : verb == "call" ? call : verb == "serve" ? serve : nullptr;
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
