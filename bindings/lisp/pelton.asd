;;;; pelton for SBCL: messages at memory speed between the threads, processes and languages of one machine.

(defsystem "pelton"
  :description "Messages at memory speed between the threads, processes and languages of one machine"
  :long-description "Channels, calls, appending and files, through the C library libpelton: see README.md."
  :version "0.2.0"
  :license "MIT OR Apache-2.0"
  :serial t
  :components ((:file "package")
               (:file "abi")
               (:file "library")
               (:file "handle")
               (:file "channel")
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
               (:file "appending")
               (:file "calls")
               (:file "files")
               (:file "other-languages"))
  :perform (test-op (operation system)
             (unless (symbol-call '#:pelton-tests '#:run)
               (error "tests of pelton have failed"))))
