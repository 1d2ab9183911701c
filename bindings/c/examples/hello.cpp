// hello.c in C++. The two work with each other.
#include <iostream>
#include <pelton.hpp>
#include <string_view>

using namespace std::chrono_literals;

static int fail(std::error_code error) {
    std::cerr << error.message() << ": " << pelton::error_detail() << '\n';
    return 1;
}

int main(int argc, char **argv) {
    const std::string_view verb = argc > 1 ? argv[1] : "";
    if (verb == "send" && argc == 3) {
        pelton::channel_options options;
        options.deadline_ns = pelton::deadline(5s).ns(); // for the receiver to be there
        auto sender = pelton::sender::open("hello", options);
        if (!sender) return fail(sender.error());
        auto sent = sender->send(pelton::as_bytes(argv[2]));
        return sent ? 0 : fail(sent.error());
    }
    if (verb == "receive" && argc == 2) {
        auto receiver = pelton::receiver::gather("hello");
        if (!receiver) return fail(receiver.error());
        auto message = receiver->receive();
        if (!message) return fail(message.error());
        std::cout << pelton::as_text(message->bytes()) << '\n'; // in the shared memory, until `message` is destroyed
        return 0;
    }
    std::cerr << "usage: hello receive | hello send TEXT\n";
    return 2;
}
