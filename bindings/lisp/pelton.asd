;;;; pelton for SBCL: messages at memory speed between the threads and processes of one machine.

(defsystem "pelton"
  :description "Messages at memory speed between the threads and processes of one machine"
  :version "0.2.0"
  :license "MIT OR Apache-2.0"
  :depends-on ()
  :serial t
  :components ((:file "package")
               (:file "library")
               (:file "handle")
               (:file "channel")
               (:file "append")
               (:file "call")
               (:file "file")
               (:file "image"))
  :in-order-to ((test-op (test-op "pelton/tests"))))

(defsystem "pelton/tests"
  :description "The tests of pelton: they count themselves, and say so in their last line"
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
             (symbol-call '#:pelton-tests '#:run)))
