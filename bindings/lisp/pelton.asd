;;;; pelton for SBCL: messages at memory speed between the threads, processes and languages of one machine.

(defsystem "pelton"
  :description "Messages at memory speed between the threads, processes and languages of one machine"
  :long-description "Channels, calls, appending and files for SBCL on x86-64 Linux, through the C library libpelton,
which is loaded with the system: the file that PELTON_LIBRARY names, or the installed libpelton.so.0.2. See README.md."
  :version "0.2.0"
  :license "MIT OR Apache-2.0"
  :author "The pelton authors"
  :homepage "https://github.com/pelton-ipc/pelton"
  :source-control (:git "https://github.com/pelton-ipc/pelton.git")
  :bug-tracker "https://github.com/pelton-ipc/pelton/issues"
  :serial t
  :components ((:file "package")
               (:file "abi")
               (:file "library")
               (:file "handle")
               (:file "channel")
               (:file "broadcast")
               (:file "subscriber-set")
               (:file "append")
               (:file "call")
               (:file "file")
               (:file "image"))
  :in-order-to ((test-op (test-op "pelton/tests"))))

(defsystem "pelton/tests"
  :description "The tests of pelton; the last line of their output has their number"
  :version "0.2.0"
  :license "MIT OR Apache-2.0"
  :depends-on ("pelton" "sb-posix")
  :pathname "tests"
  :serial t
  :components ((:file "runner")
               (:file "channels")
               (:file "broadcasts")
               (:file "appending")
               (:file "calls")
               (:file "files"))
  :perform (test-op (operation system)
             (unless (symbol-call '#:pelton-tests '#:run)
               (error "tests of pelton have failed"))))

(defsystem "pelton/tests-with-programs"
  :description "The tests of pelton, also with programs in other languages, which run-tests builds"
  :version "0.2.0"
  :license "MIT OR Apache-2.0"
  :depends-on ("pelton/tests")
  :pathname "tests"
  :components ((:file "other-languages")))
